"""Plans of micro-batches: every row once, ranks in step, limits kept."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from rl_policy_megatron import PolicySettings
from rl_policy_megatron.packing import _first_fit, plan_micro_batches

LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20]


def _cost(rows: list[int], lengths: list[int], packing: bool) -> int:
    sizes = [lengths[row] for row in rows]
    return sum(sizes) if packing else len(sizes) * max(sizes, default=0)


def _cases() -> Iterator[tuple[list[int], PolicySettings, int]]:
    draw = random.Random(0)
    for _ in range(400):
        shape = draw.choice(["short", "long", "mixed", "equal"])
        top = {"short": 3, "long": 500, "mixed": 60, "equal": 0}[shape]
        lengths = [draw.randint(0, top) if top else 7 for _ in range(draw.randint(0, 40))]
        tokens = draw.choice([None, 1, 8, 64, 512, 4096])
        size = {"micro_batch_size": draw.randint(1, 9)} if tokens is None else {}
        settings = PolicySettings(**size, micro_batch_tokens=tokens, packing=draw.random() < 0.5)
        yield lengths, settings, draw.choice([1, 1, 2, 3, 4, 16])


def test_any_plan_has_every_row_once_and_ranks_in_step() -> None:
    for lengths, settings, ranks in _cases():
        plan = plan_micro_batches(lengths, settings, ranks)
        assert len(plan) == ranks
        assert len({len(micro_batches) for micro_batches in plan}) == 1
        rows = [row for micro_batches in plan for group in micro_batches for row in group]
        assert sorted(rows) == list(range(len(lengths)))
        assert plan == plan_micro_batches(torch.tensor(lengths, dtype=torch.int64), settings, ranks)


def test_any_plan_keeps_its_limit() -> None:
    for lengths, settings, ranks in _cases():
        for micro_batches in plan_micro_batches(lengths, settings, ranks):
            for group in micro_batches:
                if settings.micro_batch_tokens is None:
                    assert len(group) <= settings.micro_batch_size
                elif len(group) > 1:
                    assert _cost(group, lengths, settings.packing) <= settings.micro_batch_tokens


def test_any_plan_begins_with_the_costliest() -> None:
    for lengths, settings, ranks in _cases():
        if settings.micro_batch_tokens is None:
            continue
        for micro_batches in plan_micro_batches(lengths, settings, ranks):
            costs = [_cost(group, lengths, settings.packing) for group in micro_batches]
            assert costs == sorted(costs, reverse=True)


def test_any_plan_halves_work_before_a_rank_has_none() -> None:
    for lengths, settings, ranks in _cases():
        groups = [group for each in plan_micro_batches(lengths, settings, ranks) for group in each]
        if settings.micro_batch_tokens is not None and [] in groups:
            assert max(map(len, groups)) <= 1


def test_any_packed_plan_wastes_less_than_half() -> None:
    """Any two groups of a first fit hold more than one limit together."""
    for lengths, settings, _ in _cases():
        limit = settings.micro_batch_tokens
        if limit is None or not settings.packing:
            continue
        (groups,) = plan_micro_batches(lengths, settings, 1)
        room_needed = sum(min(length, limit) for length in lengths)
        assert not groups or (len(groups) - 1) * limit < 2 * max(room_needed, 1)


def test_rows_are_counted_without_a_limit_of_tokens() -> None:
    plan = plan_micro_batches(LENGTHS, PolicySettings(micro_batch_size=3), 1)
    assert plan == [[[0, 3, 7], [2, 6, 5], [1, 4]]]


def test_padded_tokens_are_counted_as_rectangles() -> None:
    plan = plan_micro_batches(LENGTHS, PolicySettings(micro_batch_tokens=48), 1)
    # 2 × 24, 2 × 20, 4 × 12; the costliest first, and equal ones in the order of their rows.
    assert plan == [[[0, 3], [6, 5, 1, 4], [7, 2]]]


def test_packed_tokens_are_counted_as_a_sum() -> None:
    plan = plan_micro_batches(LENGTHS, PolicySettings(micro_batch_tokens=48, packing=True), 1)
    # As few groups as first fit needs, levelled: 37, 36, 37 tokens.
    assert plan == [[[0, 6, 4], [7, 2], [3, 5, 1]]]


def test_packed_rows_that_fit_in_one_way_only() -> None:
    """Levelled, 6, 4 and 4 would meet and exceed 12; first fit finds 12 and 12."""
    settings = PolicySettings(micro_batch_tokens=12, packing=True)
    assert plan_micro_batches([6, 6, 4, 4, 4], settings, 1) == [[[0, 1], [2, 3, 4]]]


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_beyond_the_limit_goes_alone(packing: bool) -> None:
    settings = PolicySettings(micro_batch_tokens=10, packing=packing)
    assert plan_micro_batches([2, 30, 3, 0], settings, 1) == [[[1], [2, 0, 3]]]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("tokens", [None, 64])
def test_e1_fewer_rows_than_ranks(packing: bool, tokens: int | None) -> None:
    """E1: three sequences on four ranks: one micro-batch each, the fourth an empty one."""
    settings = PolicySettings(micro_batch_tokens=tokens, packing=packing)
    assert plan_micro_batches([5, 4, 3], settings, 4) == [[[0]], [[1]], [[2]], [[]]]


@pytest.mark.parametrize("settings", [PolicySettings(), PolicySettings(micro_batch_tokens=8 * 100)])
def test_e7_groups_of_rollouts_feed_all_ranks(settings: PolicySettings) -> None:
    """E7: 128 prompts, 16 rollouts each, 256 ranks: eight rows for every rank."""
    plan = plan_micro_batches([100] * (128 * 16), settings, 256)
    assert [sum(map(len, micro_batches)) for micro_batches in plan] == [8] * 256


@pytest.mark.parametrize("tokens", [None, 4096])
def test_ranks_get_about_the_same_work(tokens: int | None) -> None:
    draw = random.Random(1)
    lengths = [min(max(round(draw.lognormvariate(5, 0.9)), 32), 1024) for _ in range(512)]
    size = {"micro_batch_size": 8} if tokens is None else {}
    settings = PolicySettings(**size, micro_batch_tokens=tokens, packing=True)
    plan = plan_micro_batches(lengths, settings, 4)
    work = [sum(_cost(group, lengths, True) for group in micro_batches) for micro_batches in plan]
    assert max(work) <= 1.02 * min(work)


@pytest.mark.parametrize("tokens", [None, 16])
def test_no_rows_need_no_micro_batches(tokens: int | None) -> None:
    assert plan_micro_batches([], PolicySettings(micro_batch_tokens=tokens), 3) == [[], [], []]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"packing": "yes"}, "packing"),
        ({"recompute": "half"}, "recompute"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PolicySettings(**wrong)  # type: ignore[arg-type]


def test_first_fit_finds_the_first_group_that_has_room() -> None:
    """The tree that finds it fast finds what a look at each group finds."""

    def plainly(order: list[int], sizes: list[int], limit: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for row in order:
            fits = (g for g in groups if sum(sizes[r] for r in g) + sizes[row] <= limit)
            group = next(fits, None)
            if group is None:
                groups.append([row])
            else:
                group.append(row)
        return groups

    draw = random.Random(2)
    for _ in range(500):
        limit = draw.randint(1, 50)
        sizes = [draw.randint(0, 60) for _ in range(draw.randint(0, 30))]
        order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
        assert _first_fit(order, sizes, limit) == plainly(order, sizes, limit)


def test_few_groups_are_close_to_the_fewest() -> None:
    """Halves, thirds and quarters that fill four groups exactly."""
    lengths = [500, 500, 334, 333, 333, 250, 250, 250, 250, 600, 400]
    settings = PolicySettings(micro_batch_tokens=1000, packing=True)
    assert len(plan_micro_batches(lengths, settings, 1)[0]) == 4
