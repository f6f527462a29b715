"""Losses and gradients: equal to transformers', whatever the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_policy_megatron import LossError

LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20]
KINDS = ["qwen3-tied", "qwen3-untied", "qwen2", "qwen2-tied", "llama3-rope"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_transformers_autograd(
    transformers_loss: Callable[..., Any],
    kind: str,
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy, model, batch = policy_of(kind, micro_batch_size=3), model_of(kind)[1], rows_of(LENGTHS)
    model.zero_grad()
    transformers_loss(model, batch).backward()
    found = policy.gradients(batch, token_mean_loss)
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def _entropic_loss(logits: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Uses everything that a view offers."""
    top, ids = logits.topk_logprobs(4)
    again = logits.logprobs_of(ids)
    mask = batch.mask
    shares = (
        (logits.logprobs().exp() * mask).sum()
        + 0.3 * (logits.entropy() * mask).sum()
        + 0.1 * ((top.exp() + again) * mask[..., None]).sum()
    )
    return shares / batch.denominator, {}


@pytest.mark.parametrize("loss_name", ["token mean", "everything"])
def test_loss_and_gradients_do_not_depend_on_micro_batches(
    loss_name: str,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    loss_fn = token_mean_loss if loss_name == "token mean" else _entropic_loss
    batch = rows_of(LENGTHS)
    results = []
    for size in (1, 3, 8):
        policy = policy_of("qwen3-tied", micro_batch_size=size)
        results.append((policy.gradients(batch, loss_fn), policy.train(batch, loss_fn, learning_rate=1e-3)))
    gradients, metrics = results[-1]
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for other_gradients, other_metrics in results[:-1]:
        assert other_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
        assert other_metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                other_gradients[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name
            )


def test_metrics_are_merged_over_micro_batches(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    batch = rows_of(LENGTHS)
    metrics = policy_of("llama", micro_batch_size=2).train(batch, token_mean_loss, learning_rate=0.0)
    assert metrics["tokens"] == float(batch.mask.sum())
    assert metrics.keys() == {"tokens", "loss", "grad_norm"}


def test_d4_fully_masked_micro_batch_adds_nothing(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    """D4: a micro-batch with nothing valid dilutes neither loss nor gradient nor metrics."""
    batch = rows_of(LENGTHS)
    mask = batch.mask.clone()
    # Rows of the two longest micro-batches of two.
    dead = sorted(range(len(LENGTHS)), key=lambda row: -LENGTHS[row])[:4]
    mask[dead] = 0
    masked = replace(batch, mask=mask, denominator=float(mask.sum()))
    alive = masked.select([row for row in range(len(LENGTHS)) if row not in dead])

    def constant_when_masked(logits: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        # Some losses return a constant here instead of a sum that happens to be 0.
        return token_mean_loss(logits, rows) if rows.mask.any() else (torch.zeros(()), {})

    policy = policy_of("qwen3-tied", micro_batch_size=2)
    expected = policy.gradients(alive, token_mean_loss)
    for loss_fn in (token_mean_loss, constant_when_masked):
        for name, gradient in policy.gradients(masked, loss_fn).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    metrics = policy.train(masked, token_mean_loss, learning_rate=0.0)
    assert metrics["loss"] == pytest.approx(
        policy.train(alive, token_mean_loss, learning_rate=0.0)["loss"], rel=1e-5
    )


def test_fully_masked_batch_has_no_loss_and_no_gradient(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    batch = rows_of(LENGTHS)
    masked = replace(batch, mask=torch.zeros_like(batch.mask), denominator=1.0)
    metrics = policy_of("llama").train(masked, token_mean_loss, learning_rate=1e-2)
    assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)


@pytest.mark.parametrize("lengths", [[1, 1], [0, 0], [0, 1, 7]])
def test_rows_too_short_to_predict_anything(
    lengths: list[int],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy, batch = policy_of("llama", micro_batch_size=1), rows_of(lengths)
    scores = policy.logprobs(batch)
    assert scores.shape == batch.input_ids.shape
    assert int((scores != 0).sum()) == int(batch.mask.sum())
    batch = replace(batch, denominator=max(batch.denominator, 1.0))
    assert math.isfinite(policy.train(batch, token_mean_loss, learning_rate=1e-3)["grad_norm"])


def test_a_loss_may_score_with_this_and_another_policy(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy, teacher, batch = policy_of("llama", micro_batch_size=3), policy_of("qwen2"), rows_of(LENGTHS)
    expected = policy.gradients(batch, token_mean_loss)

    def nested(logits: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        own = logits.logprobs()
        torch.testing.assert_close(policy.logprobs(rows), own.detach(), rtol=0, atol=1e-5)
        assert policy.model.training
        assert not teacher.logprobs(rows).requires_grad
        return token_mean_loss(logits, rows)

    found = policy.gradients(batch, nested)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_topk_follows_the_whole_distribution(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    policy, batch = policy_of("qwen2", temperature=0.5), rows_of([6, 4])
    expected, ids = (policy.token_logits(batch) / 0.5).log_softmax(-1)[:, :-1].topk(3, dim=-1)
    seen: list[Any] = []

    def read(view: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        top, found = view.topk_logprobs(3)
        seen.extend([top.detach(), found, view.logprobs_of(found).detach()])
        return top.sum() * 0.0, {}

    policy.train(batch, read, learning_rate=0.0)
    real = batch.mask.bool()
    torch.testing.assert_close(seen[0][real], expected[real[:, 1:]], rtol=0, atol=1e-5)
    assert torch.equal(seen[1][real], ids[real[:, 1:]])
    torch.testing.assert_close(seen[2], seen[0], rtol=0, atol=1e-6)
    values, tokens = policy.topk_logits(batch, 3)
    torch.testing.assert_close(values, seen[0], rtol=0, atol=1e-6)
    assert torch.equal(tokens, seen[1])
    for k in (0, policy.vocab_size + 1):
        with pytest.raises(LossError, match=f"got {k}"):
            policy.topk_logits(batch, k)
