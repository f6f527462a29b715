"""Which requests share a batch and a prompt."""

from __future__ import annotations

import random

import pytest

from rl_generation.megatron.planning import plan_batches


@pytest.mark.parametrize("equal_lengths", [False, True])
@pytest.mark.parametrize("max_rows", [1, 3, 8, 100])
def test_every_request_is_in_exactly_one_row_beside_its_own_prompt(
    max_rows: int, equal_lengths: bool
) -> None:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(3) for _ in range(rng.randrange(1, 5))) for _ in range(60)]
    batches = plan_batches(prompts, max_rows, equal_lengths=equal_lengths)
    assert sorted(i for b in batches for i in b.requests) == list(range(60))
    for batch in batches:
        assert batch.rows == len(batch.requests) == sum(batch.counts) <= max_rows
        assert len(set(batch.prompts)) == len(batch.prompts)
        lengths = [len(p) for p in batch.prompts]
        assert lengths == sorted(lengths)
        assert batch.longest_prompt == lengths[-1]
        owners = [p for p, count in zip(batch.prompts, batch.counts, strict=True) for _ in range(count)]
        assert owners == [prompts[i] for i in batch.requests]
        assert not equal_lengths or len(set(lengths)) == 1


def test_a_group_of_rollouts_is_one_prompt() -> None:
    a, b = (1, 2, 3), (4, 5)
    (batch,) = plan_batches([a, b, a, b, a], 8, equal_lengths=False)
    assert batch.prompts == (b, a)
    assert batch.counts == (2, 3)
    assert batch.requests == (1, 3, 0, 2, 4)


def test_no_requests_make_no_batch() -> None:
    assert plan_batches([], 8, equal_lengths=False) == []
