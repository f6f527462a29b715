"""Updates: equal to plain AdamW, and none where none is due."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_policy_megatron import OptimizerSettings, RuntimeStateError

LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20]


@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3-tied"])
def test_updates_equal_torch_adamw_with_clipping(
    transformers_loss: Callable[..., Any],
    kind: str,
    clip: float,
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:

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
        loss = transformers_loss(model, batch)
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
    before = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    policy.train(
        rows_of(LENGTHS), lambda logits, batch: (logits.logprobs().sum() * 0.0, {}), learning_rate=0.1
    )
    for name, tensor in policy.stream_weights():
        decayed = not name.endswith("bias") and "norm" not in name
        factor = 0.95 if decayed else 1.0
        torch.testing.assert_close(tensor, before[name] * factor, rtol=1e-5, atol=1e-7, msg=name)


def test_learning_rate_zero_changes_no_bit(
    weights_hash: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy = policy_of("qwen2", OptimizerSettings(weight_decay=0.1))
    before = weights_hash(policy)
    for seed in range(3):
        assert policy.train(rows_of(LENGTHS, seed=seed), token_mean_loss, learning_rate=0.0)["grad_norm"] > 0
    assert weights_hash(policy) == before


def test_batch_without_rows_changes_nothing(
    weights_hash: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy = policy_of("llama")
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    before = weights_hash(policy)
    nothing = rows_of(LENGTHS).select([])
    assert policy.train(nothing, token_mean_loss, learning_rate=1e-2) == {"loss": 0.0, "grad_norm": 0.0}
    assert weights_hash(policy) == before
    assert policy.logprobs(nothing).shape == nothing.input_ids.shape
    assert policy.token_logits(nothing).shape == (*nothing.input_ids.shape, 61)
    assert not any(gradient.any() for gradient in policy.gradients(nothing, token_mean_loss).values())
    # Rows of which no token is predicted are none either: momentum must not move the weights.
    silent = replace(rows_of(LENGTHS), lengths=torch.ones(len(LENGTHS), dtype=torch.int64))
    assert (
        policy.train(silent, lambda view, _: (view.logprobs().sum(), {}), learning_rate=1e-2)["loss"] == 0.0
    )
    assert weights_hash(policy) == before


def test_reset_optimizer_forgets_moments_and_takes_new_settings(
    weights_hash: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
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
    assert weights_hash(policy) == weights_hash(other)


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
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy, batch = policy_of("qwen3-tied", dtype="bfloat16"), rows_of(LENGTHS)
    losses = [policy.train(batch, token_mean_loss, learning_rate=1e-2)["loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    before = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    # One update is below bfloat16's resolution for most weights; without master copies it stays so.
    for _ in range(30):
        policy.train(batch, token_mean_loss, learning_rate=3e-5)
    moved = [float((tensor != before[name]).float().mean()) for name, tensor in policy.stream_weights()]
    assert sum(moved) / len(moved) > 0.05
