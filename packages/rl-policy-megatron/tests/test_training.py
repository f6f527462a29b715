"""Updates: the same whatever the micro-batches, equal to plain torch, and tidy when they fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_policy_megatron import (
    BatchError,
    LossError,
    NonFiniteGradientError,
    OptimizerSettings,
    RuntimeStateError,
)

LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20]
KINDS = ["qwen3-tied", "qwen3-untied", "qwen2", "qwen2-tied", "llama3-rope"]


def _transformers_loss(model: Any, batch: Any) -> torch.Tensor:
    log_p = model(batch.input_ids).logits.log_softmax(-1)[:, :-1]
    chosen = log_p.gather(2, batch.input_ids[:, 1:, None])[..., 0]
    return -(chosen * batch.mask[:, 1:]).sum() / batch.denominator


def _weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.stream_weights()}


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_transformers_autograd(
    kind: str,
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy, model, batch = policy_of(kind, micro_batch_size=3), model_of(kind)[1], rows_of(LENGTHS)
    model.zero_grad()
    _transformers_loss(model, batch).backward()
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


@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3-tied"])
def test_updates_equal_torch_adamw_with_clipping(
    kind: str,
    clip: float,
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    import copy

    model = copy.deepcopy(model_of(kind)[1])
    settings = OptimizerSettings(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, grad_clip=clip)
    policy = policy_of(kind, settings, micro_batch_size=3)
    groups = {True: [], False: []}
    for weight in model.parameters():
        groups[weight.dim() > 1].append(weight)
    reference = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.3}, {"params": groups[False], "weight_decay": 0.0}],
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for step, rate in enumerate((1e-2, 3e-3, 1e-2)):
        batch = rows_of(LENGTHS, seed=step)
        loss = _transformers_loss(model, batch)
        reference.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        metrics = policy.train(batch, token_mean_loss, learning_rate=rate)
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    expected = dict(model.named_parameters())
    for name, tensor in policy.stream_weights():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-3, atol=2e-5, msg=name)


def test_norms_and_biases_do_not_decay(policy_of: Callable[..., Any], rows_of: Callable[..., Any]) -> None:
    policy = policy_of("qwen2", OptimizerSettings(weight_decay=0.5))
    before = _weights(policy)
    policy.train(
        rows_of(LENGTHS), lambda logits, batch: (logits.logprobs().sum() * 0.0, {}), learning_rate=0.1
    )
    for name, tensor in policy.stream_weights():
        decayed = not name.endswith("bias") and "norm" not in name
        factor = 0.95 if decayed else 1.0
        torch.testing.assert_close(tensor, before[name] * factor, rtol=1e-5, atol=1e-7, msg=name)


def test_learning_rate_zero_changes_no_bit(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy = policy_of("qwen2", OptimizerSettings(weight_decay=0.1))
    before = _weights(policy)
    for seed in range(3):
        assert policy.train(rows_of(LENGTHS, seed=seed), token_mean_loss, learning_rate=0.0)["grad_norm"] > 0
    assert _same(before, _weights(policy))


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


def test_batch_without_rows_changes_nothing(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy = policy_of("llama")
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    before = _weights(policy)
    nothing = rows_of(LENGTHS).select([])
    assert policy.train(nothing, token_mean_loss, learning_rate=1e-2) == {"loss": 0.0, "grad_norm": 0.0}
    assert _same(before, _weights(policy))
    assert policy.logprobs(nothing).shape == nothing.input_ids.shape
    assert policy.token_logits(nothing).shape == (*nothing.input_ids.shape, 61)
    assert not any(gradient.any() for gradient in policy.gradients(nothing, token_mean_loss).values())


def test_failing_loss_leaves_no_trace(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy, batch = policy_of("qwen3-tied", micro_batch_size=2), rows_of(LENGTHS)
    clean = policy.gradients(batch, token_mean_loss)
    before, outer = _weights(policy), torch.get_rng_state()
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
    assert _same(before, _weights(policy))
    assert _same(clean, policy.gradients(batch, token_mean_loss))


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


def test_non_finite_loss_or_gradient_changes_no_weight(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy, batch = policy_of("llama"), rows_of(LENGTHS)
    before = _weights(policy)
    with pytest.raises(LossError, match="nan"):
        policy.train(batch, lambda logits, rows: (logits.logprobs().sum() * math.nan, {}), learning_rate=1e-2)

    def infinite_slope(logits: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return (logits.logprobs() * 0).sum().sqrt(), {}

    with pytest.raises(NonFiniteGradientError, match="not changed"):
        policy.train(batch, infinite_slope, learning_rate=1e-2)
    assert _same(before, _weights(policy))
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


def test_reset_optimizer_forgets_moments_and_takes_new_settings(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    warm, fresh = OptimizerSettings(betas=(0.5, 0.6)), OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.2)
    policy = policy_of("llama", warm)
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=0.0)
    policy.reset_optimizer(fresh)
    other = policy_of("llama", fresh)
    for seed in range(2):
        batch = rows_of(LENGTHS, seed=seed)
        assert policy.train(batch, token_mean_loss, learning_rate=1e-2) == other.train(
            batch, token_mean_loss, learning_rate=1e-2
        )
    assert _same(_weights(policy), _weights(other))


def test_reference_is_frozen_when_asked(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy, batch = policy_of("qwen3-tied"), rows_of(LENGTHS)
    with pytest.raises(RuntimeStateError, match="keep_reference"):
        policy.reference_logprobs(batch)
    policy.keep_reference()
    before = policy.logprobs(batch)
    policy.train(batch, token_mean_loss, learning_rate=1e-2)
    assert torch.equal(policy.reference_logprobs(batch), before)
    assert (policy.logprobs(batch) - before).abs().max() > 1e-3
    policy.keep_reference()
    assert torch.equal(policy.reference_logprobs(batch), policy.logprobs(batch))


def test_bfloat16_learns_through_float32_master_weights(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy, batch = policy_of("qwen3-tied", dtype="bfloat16"), rows_of(LENGTHS)
    losses = [policy.train(batch, token_mean_loss, learning_rate=1e-2)["loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    before = _weights(policy)
    # One update is below bfloat16's resolution for most weights; without master copies it stays so.
    for _ in range(30):
        policy.train(batch, token_mean_loss, learning_rate=3e-5)
    moved = [float((tensor != before[name]).float().mean()) for name, tensor in policy.stream_weights()]
    assert sum(moved) / len(moved) > 0.05


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


@pytest.mark.parametrize("rate", [-1e-3, math.nan, math.inf])
def test_learning_rate_must_be_a_number(
    rate: float,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        policy_of("llama").train(rows_of([4]), token_mean_loss, learning_rate=rate)
