"""Settings and random numbers of a batch."""

from __future__ import annotations

import random

import torch

from rl_generation import SamplingParams
from rl_generation.row_settings import RowSettings, request_uniforms

CPU = torch.device("cpu")


def test_a_seed_gives_the_same_numbers_in_any_batch_and_of_any_length() -> None:
    alone = request_uniforms([7], 5)
    among = request_uniforms([3, None, 7, 9], 40)
    assert torch.equal(alone[0], among[2, :5])


def test_numbers_are_uniform_on_the_half_open_unit_interval() -> None:
    u = request_uniforms(list(range(50)), 2000)
    assert u.dtype == torch.float64
    assert 0 <= u.min() < u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.005
    assert abs(u.var().item() - 1 / 12) < 0.002
    by_seed = u[:, :1000]
    correlation = torch.corrcoef(by_seed) - torch.eye(50, dtype=torch.float64)
    assert correlation.abs().max() < 0.2


def test_seeds_that_differ_only_above_32_bits_differ() -> None:
    """A generator that keeps the low word of its seed would repeat ``step << 32 | row`` every step."""
    u = request_uniforms([5, 5 | 1 << 32, 5 | 1 << 62], 4)
    assert len({tuple(row) for row in u.tolist()}) == 3


def test_unseeded_requests_differ_and_leave_random_states_alone() -> None:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    first, second = request_uniforms([None, None], 8)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    params = [
        SamplingParams(4, temperature=0, top_k=2, top_p=0.1),
        SamplingParams(4, temperature=0.5, top_k=3, seed=11),
        SamplingParams(4, seed=12),
    ]
    tokens, logprobs = RowSettings.of(params, 4, CPU).next_tokens(logits, 2)
    for row, p in enumerate(params):
        alone = RowSettings.of([p], 4, CPU).next_tokens(logits[row : row + 1], 2)
        assert tokens[row] == alone[0][0]
        torch.testing.assert_close(logprobs[row], alone[1][0])
    assert tokens[0] == logits[0].argmax()
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits[0], -1).max())


def test_kept_rows_go_on_with_their_own_numbers_and_settings() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 20)
    params = [SamplingParams(4, temperature=0.5 + i, top_k=3 + i, seed=i) for i in range(4)]
    settings = RowSettings.of(params, 4, CPU)
    tokens, logprobs = settings.next_tokens(logits, 3)
    rows = torch.tensor([1, 3])
    kept_tokens, kept_logprobs = settings.keep(rows).next_tokens(logits[rows], 3)
    assert torch.equal(kept_tokens, tokens[rows])
    assert torch.equal(kept_logprobs, logprobs[rows])


def test_each_step_uses_its_own_number() -> None:
    logits = torch.zeros(1, 1000)
    settings = RowSettings.of([SamplingParams(20, seed=1)], 20, CPU)
    tokens = [int(settings.next_tokens(logits, step)[0]) for step in range(20)]
    assert len(set(tokens)) > 15
    assert tokens == (request_uniforms([1], 20)[0] * 1000).long().tolist()
