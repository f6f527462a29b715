"""The policy's model generates with megatron's key-value cache as it scores in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_policy_megatron import RuntimeStateError

KINDS = ["qwen3-tied", "qwen2", "llama3-rope"]
PROMPT, NEW = 7, 6


@pytest.fixture
def context_of() -> Callable[..., Any]:
    from megatron.core.inference.contexts import StaticInferenceContext

    return lambda rows, length: StaticInferenceContext(max_batch_size=rows, max_sequence_length=length)


def _decode(
    model: Any, context: Any, ids: torch.Tensor, prompt: int, masked_keys: torch.Tensor | None = None
) -> torch.Tensor:
    """``[B, S − prompt + 1, V]`` logits from prefill and single-token steps over given tokens.

    ``masked_keys [B, S]`` marks columns that nobody may look at.
    """
    rows, width = ids.shape
    outputs = []
    start, end = 0, prompt
    while start < width:
        positions = torch.arange(start, end).expand(rows, -1)
        mask = None
        if masked_keys is not None:
            later = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
            mask = later[None, None] | masked_keys[:, None, None, :end]
        logits = model(
            ids[:, start:end], positions, mask, inference_context=context, runtime_gather_output=True
        )
        context.sequence_len_offset += end - start
        outputs.append(logits[:, -1:])
        start, end = end, end + 1
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_equals_the_full_forward(
    kind: str,
    guard: Any,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    context_of: Callable[..., Any],
) -> None:
    policy, batch = policy_of(kind), rows_of([PROMPT + NEW] * 3)
    with guard():
        decoded = _decode(policy.model, context_of(3, PROMPT + NEW), batch.input_ids, PROMPT)
    full = policy.token_logits(batch)[:, PROMPT - 1 :]
    assert (decoded - full).abs().max() <= 1e-5 * full.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_prompts_with_an_explicit_mask(
    kind: str, policy_of: Callable[..., Any], rows_of: Callable[..., Any], context_of: Callable[..., Any]
) -> None:
    """D8: left padding under a mask changes no log-probability."""
    policy = policy_of(kind)
    pads = [0, 3, 5]
    batch = rows_of([PROMPT + NEW - pad for pad in pads])
    width = PROMPT + NEW
    ids = torch.full((3, width), 9)
    for row, pad in enumerate(pads):
        ids[row, pad:] = batch.input_ids[row, : width - pad]
    masked = torch.arange(width) < torch.tensor(pads)[:, None]
    with torch.inference_mode():
        decoded = _decode(policy.model, context_of(3, width), ids, PROMPT, masked).log_softmax(-1)
    full = policy.token_logits(batch).log_softmax(-1)
    for row, pad in enumerate(pads):
        expected = full[row, PROMPT - pad - 1 : width - pad]
        assert (decoded[row] - expected).abs().max() <= 1e-5


def test_partly_cached_prompt_needs_a_mask(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], context_of: Callable[..., Any]
) -> None:
    policy, batch = policy_of("qwen3-tied"), rows_of([9])
    context = context_of(1, 9)
    positions = torch.arange(9)[None]
    with torch.no_grad():
        policy.model(
            batch.input_ids[:, :4],
            positions[:, :4],
            None,
            inference_context=context,
            runtime_gather_output=True,
        )
        context.sequence_len_offset = 4
        rest = (batch.input_ids[:, 4:], positions[:, 4:])
        with pytest.raises(RuntimeStateError, match="attention_mask"):
            policy.model(*rest, None, inference_context=context, runtime_gather_output=True)
        mask = torch.arange(9)[None, :] > torch.arange(4, 9)[:, None]
        logits = policy.model(*rest, mask, inference_context=context, runtime_gather_output=True)
    assert (logits[:, -1] - policy.token_logits(batch)[:, -1]).abs().max() <= 1e-4


def test_training_follows_generation_under_inference_mode(
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    context_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    """megatron caches rotary tables by length; those made under inference_mode must serve training too."""
    width = PROMPT + NEW
    batch = rows_of([width + 1] * 2)
    expected = policy_of("qwen3-tied").gradients(batch, token_mean_loss)
    policy = policy_of("qwen3-tied")
    with torch.inference_mode():
        _decode(policy.model, context_of(2, width), batch.input_ids[:, :width], PROMPT)
        policy.model(batch.input_ids[:, :width], torch.arange(width)[None], None)
    found = policy.gradients(batch, token_mean_loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
