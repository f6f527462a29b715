"""Log-probabilities and entropies straight from hidden states, without ever holding all logits.

Logits exist for one chunk of tokens at a time, in the forward pass and again, recomputed, in the
backward pass. Arithmetic on logits is float32 whatever the model's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of chosen tokens, and the entropy of the whole distribution.

    Args:
        hidden: ``[N, H]``, one row per predicted token.
        weight: ``[V, H]``; logits are ``hidden @ weight.T / temperature``.
        token_ids: ``[N, K]`` int64, the tokens to score at each position.
        temperature: > 0.
        chunk_tokens: rows whose logits exist at one time.
        with_entropy: compute the entropies; else they are 0.

    Returns:
        ``[N, K]`` float32 log-probabilities and ``[N]`` float32 entropies in nats, both
        differentiable with respect to ``hidden`` and ``weight``.
    """
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, weight, token_ids, temperature, chunk_tokens, with_entropy
    )
    return logprobs, entropy


@torch.no_grad()
def linear_topk(hidden: torch.Tensor, weight: torch.Tensor, k: int, *, chunk_tokens: int) -> torch.Tensor:
    """``[N, k]`` int64: the k most likely tokens at each position, most likely first."""
    chosen = [
        (hidden[rows] @ weight.t()).float().topk(k, dim=-1).indices
        for rows in _chunks(len(hidden), chunk_tokens)
    ]
    return torch.cat(chosen) if chosen else hidden.new_zeros((0, k), dtype=torch.int64)


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In float32, overwriting float32 input."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override] (torch declares forward for any arguments)
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(token_ids.shape, dtype=torch.float32, device=hidden.device)
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(normalizer)
        transposed = weight.t()
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = _tempered(hidden[rows] @ transposed, temperature)
            largest = logits.amax(-1, keepdim=True)
            logits.sub_(largest)
            chosen = logits.gather(1, token_ids[rows])
            unnormalized = logits.exp() if with_entropy else logits.exp_()
            mass = unnormalized.sum(-1)
            log_mass = mass.log()
            logprobs[rows] = chosen - log_mass[:, None]
            if with_entropy:
                entropy[rows] = log_mass - (unnormalized.mul_(logits).sum(-1) / mass)
            normalizer[rows] = log_mass + largest[:, 0]
        ctx.save_for_backward(hidden, weight, token_ids, normalizer, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy = gradients
        hidden, weight, token_ids, normalizer, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None, None
        transposed = weight.t()
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            log_p = _tempered(hidden[rows] @ transposed, ctx.temperature).sub_(normalizer[rows, None])
            # With x the tempered logits: d log p_t / d x_j = [t = j] − p_j,
            # and d entropy / d x_j = −p_j (log p_j + entropy).
            slope = torch.zeros_like(normalizer[rows, None])
            if grad_logprobs is not None:
                slope = slope - grad_logprobs[rows].sum(-1, keepdim=True)
            if grad_entropy is not None:
                weighted = grad_entropy[rows, None]
                probabilities = log_p.exp()
                grad_logits = log_p.add_(entropy[rows, None]).mul_(-weighted).add_(slope).mul_(probabilities)
            else:
                grad_logits = log_p.exp_().mul_(slope)
            if grad_logprobs is not None:
                grad_logits.scatter_add_(1, token_ids[rows], grad_logprobs[rows])
            grad_logits = _tempered(grad_logits, ctx.temperature).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None
