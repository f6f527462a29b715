"""What goes wrong is named, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_policy_megatron import BatchError, LossError, NonFiniteGradientError

LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20]


def test_failing_loss_leaves_no_trace(
    weights_hash: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy, batch = policy_of("qwen3-tied", micro_batch_size=2), rows_of(LENGTHS)
    clean = policy.gradients(batch, token_mean_loss)
    before, outer = weights_hash(policy), torch.get_rng_state()
    calls = 0

    def failing(logits: Any, rows: Any) -> Any:
        nonlocal calls
        calls += 1
        torch.rand(3)
        if calls == 3:
            raise ZeroDivisionError("planted")
        return token_mean_loss(logits, rows)

    with pytest.raises(ZeroDivisionError, match="planted"):
        policy.train(batch, failing, learning_rate=1e-2)
    assert torch.equal(torch.get_rng_state(), outer)
    assert not policy.model.training
    assert all(weight.grad is None and not weight.main_grad.any() for weight in policy.model.parameters())
    assert weights_hash(policy) == before
    again = policy.gradients(batch, token_mean_loss)
    assert all(torch.equal(again[name], clean[name]) for name in clean)


def test_a_loss_draws_from_the_policys_own_stream(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    drawn: dict[int, list[float]] = {}

    def drawing(logits: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        drawn[seed].append(float(torch.rand(())))
        return logits.logprobs().sum() * 0.0, {}

    torch.manual_seed(5)
    outer = torch.get_rng_state()
    for seed in (3, 4):
        drawn[seed] = []
        policy = policy_of("llama", seed=seed, micro_batch_size=100)
        for _ in range(2):
            policy.train(rows_of([4]), drawing, learning_rate=0.0)
    assert torch.equal(torch.get_rng_state(), outer)
    assert len({*drawn[3], *drawn[4]}) == 4
    torch.manual_seed(3)
    assert drawn[3] == [float(torch.rand(())), float(torch.rand(()))]


def test_non_finite_loss_or_gradient_changes_no_weight(
    weights_hash: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy, batch = policy_of("llama"), rows_of(LENGTHS)
    before = weights_hash(policy)
    with pytest.raises(LossError, match="nan"):
        policy.train(batch, lambda logits, rows: (logits.logprobs().sum() * math.nan, {}), learning_rate=1e-2)

    def infinite_slope(logits: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return (logits.logprobs() * 0).sum().sqrt(), {}

    with pytest.raises(NonFiniteGradientError, match="not changed"):
        policy.train(batch, infinite_slope, learning_rate=1e-2)
    assert weights_hash(policy) == before
    assert math.isfinite(policy.train(batch, token_mean_loss, learning_rate=1e-2)["grad_norm"])


@pytest.mark.parametrize("loss", [1.0, torch.zeros(2), torch.zeros((), dtype=torch.int64)])
def test_loss_must_be_a_scalar_tensor(
    loss: Any, policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    with pytest.raises(LossError, match="scalar"):
        policy_of("llama").train(rows_of([4]), lambda *_: (loss, {}), learning_rate=0.0)


def test_view_refuses_wrong_questions(policy_of: Callable[..., Any], rows_of: Callable[..., Any]) -> None:
    policy, batch = policy_of("llama"), rows_of([4])
    for question in (
        lambda view: view.topk_logprobs(0),
        lambda view: view.topk_logprobs(62),
        lambda view: view.logprobs_of(torch.zeros(1, 4, dtype=torch.int64)),
        lambda view: view.logprobs_of(torch.full((1, 4, 2), 61)),
    ):
        with pytest.raises(LossError, match=r"vocabulary|must be"):
            policy.train(batch, lambda view, _, ask=question: ask(view), learning_rate=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros(2, 4)}, "int64"),
        ({"lengths": torch.tensor([4, 5])}, r"lengths must lie in \[0, 4\]"),
        ({"lengths": torch.tensor([4, -1])}, "lengths must lie in"),
        ({"lengths": torch.tensor([4])}, "lengths must be int64"),
        ({"input_ids": torch.tensor([[1, 2, 61, 0], [1, 2, 3, 0]])}, r"input_ids\[0, 2\] is 61"),
        ({"input_ids": torch.tensor([[1, 2, 3, 0], [1, -1, 3, 0]])}, r"input_ids\[1, 1\] is -1"),
    ],
)
def test_broken_batches_are_refused_by_name(
    change: dict[str, Any],
    message: str,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    batch = replace(rows_of([3, 3], width=4), **change)
    policy = policy_of("llama")
    with pytest.raises(BatchError, match=message):
        policy.logprobs(batch)
    with pytest.raises(BatchError, match=message):
        policy.train(batch, token_mean_loss, learning_rate=0.0)
