"""Which requests are decoded together, and which of them share one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Rows that are decoded together, ordered by prompt so that equal prompts are neighbours.

    Attributes:
        requests: for each row, the index of its request.
        prompts: the distinct prompts, shortest first.
        counts: for each distinct prompt, how many consecutive rows continue it.
    """

    requests: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.requests)

    @property
    def longest_prompt(self) -> int:
        """Tokens in the longest prompt."""
        return len(self.prompts[-1])


def plan_batches(
    prompts: Sequence[tuple[int, ...]], max_rows: int, *, equal_lengths: bool
) -> list[PromptBatch]:
    """Batches that together hold every prompt exactly once.

    Prompts of similar length land in one batch; a group of rollouts of one prompt stays together where
    ``max_rows`` allows it.

    Args:
        prompts: one per request, none of them empty.
        max_rows: the most rows that a batch may have.
        equal_lengths: a batch holds prompts of one length only.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i]))
    batches: list[PromptBatch] = []
    start = 0
    while start < len(order):
        end = min(start + max_rows, len(order))
        if equal_lengths:
            length = len(prompts[order[start]])
            while len(prompts[order[end - 1]]) != length:
                end -= 1
        batches.append(_batch(prompts, order[start:end]))
        start = end
    return batches


def _batch(prompts: Sequence[tuple[int, ...]], requests: Sequence[int]) -> PromptBatch:
    counts: dict[tuple[int, ...], int] = {}
    for request in requests:
        counts[prompts[request]] = counts.get(prompts[request], 0) + 1
    return PromptBatch(tuple(requests), tuple(counts), tuple(counts.values()))
