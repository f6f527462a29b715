"""Which rows go through the model together: the plan of micro-batches for every data-parallel rank.

The plan depends on the lengths and the settings only, so every rank computes the same one by itself.
Losses are shares of the global loss and gradients are added, so a plan decides about memory and
speed, and about results no further than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import TypeVar

import torch

from .settings import PolicySettings

Rows = list[int]
_Item = TypeVar("_Item")


def plan_micro_batches(
    lengths: Sequence[int] | torch.Tensor, settings: PolicySettings, ranks: int
) -> list[list[Rows]]:
    """Row numbers by data-parallel rank and micro-batch.

    Every row occurs exactly once, and every rank gets the same number of micro-batches, because the
    ranks meet in collectives; where rows are too few, micro-batches are empty. The costliest come
    first, so that memory peaks at once, and those that ranks run at the same time cost about the same.

    With ``micro_batch_tokens`` no micro-batch of several rows exceeds it, counted as
    ``rows × longest`` or, with ``packing``, as the sum of the lengths. A row that is longer
    has a micro-batch to itself. Without it, a micro-batch has up to ``micro_batch_size`` rows.

    Args:
        lengths: real tokens per row, ≥ 0.
        settings: of the policy.
        ranks: data-parallel ranks, ≥ 1.

    Returns:
        ``plan[rank][micro_batch]`` → row numbers; no micro-batches at all when there are no rows.
    """
    sizes = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    # sorted is stable: rows of equal length keep their order.
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    if settings.micro_batch_tokens is None:
        return _dealt_by_rows(order, settings.micro_batch_size, ranks)
    limit = settings.micro_batch_tokens

    def cost(rows: Rows) -> int:
        tokens = [sizes[row] for row in rows]
        return sum(tokens) if settings.packing else max(tokens, default=0) * len(tokens)

    if settings.packing:
        groups = _first_fit(order, sizes, limit)
        levelled = _levelled(order, sizes, len(groups) + -len(groups) % ranks)
        if all(len(rows) <= 1 or cost(rows) <= limit for rows in levelled):
            groups = levelled
    else:
        groups = _filled_rectangles(order, sizes, limit)

    # Ranks wait for each other, so work is halved before any of them runs an empty micro-batch.
    while len(groups) % ranks:
        widest = max(groups, key=lambda rows: (len(rows) > 1, cost(rows)))
        groups.remove(widest)
        groups += [widest[::2], widest[1::2]]
    groups.sort(key=cost, reverse=True)
    return _dealt(groups, ranks)


def _dealt_by_rows(order: Rows, micro_batch_size: int, ranks: int) -> list[list[Rows]]:
    own = _dealt(order, ranks)
    rounds = range(0, max(map(len, own)), micro_batch_size)
    return [[rows[start : start + micro_batch_size] for start in rounds] for rows in own]


def _dealt(items: Sequence[_Item], ranks: int) -> list[list[_Item]]:
    """Items like cards to ranks, every other time in reverse: sorted ones add up to about the same."""
    hands: list[list[_Item]] = [[] for _ in range(ranks)]
    for start in range(0, len(items), ranks):
        turn = items[start : start + ranks]
        for hand, item in zip(hands if start // ranks % 2 == 0 else reversed(hands), turn, strict=False):
            hand.append(item)
    return hands


def _filled_rectangles(order: Rows, sizes: Sequence[int], limit: int) -> list[Rows]:
    """Consecutive rows, longest first, as many as ``rows × longest`` allows."""
    groups: list[Rows] = []
    start = 0
    while start < len(order):
        count = max(limit // max(sizes[order[start]], 1), 1)
        groups.append(order[start : start + count])
        start += count
    return groups


def _first_fit(order: Rows, sizes: Sequence[int], limit: int) -> list[Rows]:
    """First-fit decreasing: each row goes to the first group that has room for it.

    Few groups: at most 11/9 of the fewest possible groups, plus 6/9 (Dósa 2007). A tree over the groups,
    whose nodes hold the most room below them, finds the first one in logarithmic time.
    """
    groups: list[Rows] = []
    leaves = 1 << max(len(order) - 1, 0).bit_length()
    # Groups that have no row yet have all the room, so the first of them is found where no other fits.
    room = [limit] * (2 * leaves)
    for row in order:
        node = 1
        if sizes[row] > limit:
            node = leaves + len(groups)
        while node < leaves:
            node = 2 * node if room[2 * node] >= sizes[row] else 2 * node + 1
        if node - leaves == len(groups):
            groups.append([])
        groups[node - leaves].append(row)
        room[node] = max(room[node] - sizes[row], -1)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return groups


def _levelled(order: Rows, sizes: Sequence[int], count: int) -> list[Rows]:
    """So many groups, each row to the one with the fewest tokens: about equal, whatever the limit."""
    groups: list[Rows] = [[] for _ in range(count)]
    heap = [(0, 0, index) for index in range(count)]
    for row in order:
        tokens, rows, index = heap[0]
        groups[index].append(row)
        heapreplace(heap, (tokens + sizes[row], rows + 1, index))
    return groups
