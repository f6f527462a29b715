"""Log-probabilities and entropies straight from hidden states, without ever holding all logits.

Logits exist for one chunk of tokens at a time, in the forward pass and again, recomputed, in the
backward pass. That begins where the forward pass ended: with the last chunk, and with as many before
it as fit into a small constant amount of memory, whose logits are kept instead. Arithmetic on logits is
float32 whatever the model's type.

Under tensor parallelism each rank has the logits of its part of the vocabulary. It reduces them to
a few numbers per token first, and the ranks combine those once for all chunks:
with m the largest logit, ``log Σ exp x = m + log Σ_ranks exp(m_rank − m) Σ exp(x − m_rank)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .vocabulary import VocabularyShard

# Logits of small vocabularies that are kept between forward and backward pass, in bytes.
_KEPT_BYTES = 64 << 20


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    vocabulary: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of chosen tokens, and the entropy of the whole distribution.

    Args:
        hidden: ``[N, H]``, one row per predicted token, the same on every rank of the vocabulary.
        weight: ``[V, H]``; logits are ``hidden @ weight.T / temperature``. This rank's rows of it
            where there is a ``vocabulary``.
        token_ids: ``[N, K]`` int64, the tokens to score at each position, numbered in the whole vocabulary.
        temperature: > 0.
        chunk_tokens: rows whose logits exist at one time.
        with_entropy: compute the entropies; else they are 0.
        vocabulary: which tokens ``weight`` belongs to; by default all of them.

    Returns:
        ``[N, K]`` float32 log-probabilities and ``[N]`` float32 entropies in nats, both
        differentiable with respect to ``hidden`` and ``weight``, and the same on every rank. The
        gradient of ``hidden`` is this rank's share: the ranks' shares add up to the gradient.
    """
    vocabulary = vocabulary or VocabularyShard(len(weight))
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, _of_tokens(weight, vocabulary), token_ids, temperature, chunk_tokens, with_entropy, vocabulary
    )
    return logprobs, entropy


@torch.no_grad()
def linear_topk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    chunk_tokens: int,
    vocabulary: VocabularyShard | None = None,
) -> torch.Tensor:
    """``[N, k]`` int64: the k most likely tokens at each position, most likely first.

    Arguments as for :func:`linear_logprobs`; ``k`` ≤ the size of the whole vocabulary.
    """
    vocabulary = vocabulary or VocabularyShard(len(weight))
    weight = _of_tokens(weight, vocabulary)
    own = min(k, len(weight))
    logits = torch.full((len(hidden), k), -torch.inf, dtype=torch.float32, device=hidden.device)
    tokens = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    for rows in _chunks(len(hidden), chunk_tokens):
        logits[rows, :own], tokens[rows, :own] = (hidden[rows] @ weight.t()).float().topk(own, dim=-1)
    if vocabulary.ranks.size == 1:
        return tokens
    logits = torch.cat(vocabulary.ranks.gather(logits), dim=-1)
    tokens = torch.cat(vocabulary.ranks.gather(tokens + vocabulary.start), dim=-1)
    return tokens.gather(1, logits.topk(k, dim=-1).indices)


def _of_tokens(weight: torch.Tensor, vocabulary: VocabularyShard) -> torch.Tensor:
    """The rows that belong to tokens: padded ones take no part in anything."""
    return weight if vocabulary.real_rows == len(weight) else weight[: vocabulary.real_rows]


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _chunks_to_keep(logits: int) -> int:
    """How many chunks of so many float32 logits; one exists anyway."""
    return max(1, _KEPT_BYTES // max(1, 4 * logits))


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In float32, overwriting float32 input."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _owned(token_ids: torch.Tensor, vocabulary: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of this rank's shard for the tokens, 0 for those of other ranks, and which are its own."""
    if vocabulary.ranks.size == 1:
        return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
    local = token_ids - vocabulary.start
    own = (local >= 0) & (local < vocabulary.real_rows)
    return local.masked_fill(~own, 0), own


@dataclass(slots=True)
class _Kept:
    """Numbers of one chunk ``[n, V]``, each to be used once, because using them overwrites them.

    Attributes:
        numbers: tempered logits less ``subtracted``, or the exponentials of those.
        subtracted: ``[n]``.
        exponentiated: which of both.
    """

    numbers: torch.Tensor
    subtracted: torch.Tensor
    exponentiated: bool

    def logprobs(self, normalizer: torch.Tensor) -> torch.Tensor:
        """With ``normalizer`` ``[n]`` the logarithm of the sum of the exponentials of all logits."""
        assert not self.exponentiated
        return self.numbers.sub_((normalizer - self.subtracted)[:, None])

    def probabilities(self, normalizer: torch.Tensor) -> torch.Tensor:
        """As :meth:`logprobs`, exponentiated."""
        if not self.exponentiated:
            return self.logprobs(normalizer).exp_()
        return self.numbers.mul_((self.subtracted - normalizer).exp_()[:, None])


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
        vocabulary: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.zeros(token_ids.shape, dtype=torch.float32, device=hidden.device)
        largest, mass, weighted = chosen.new_zeros(3, len(hidden))
        # A rank whose rows are all padding has no largest logit.
        largest.fill_(-torch.inf)
        local, own = _owned(token_ids, vocabulary)
        transposed = weight.t()
        chunks = list(_chunks(len(hidden) if len(weight) else 0, chunk_tokens))
        learns = any(ctx.needs_input_grad[:2])
        first_kept = len(chunks) - _chunks_to_keep(chunk_tokens * len(weight))
        kept: list[_Kept] = []
        for number, rows in enumerate(chunks):
            logits = _tempered(hidden[rows] @ transposed, temperature)
            largest[rows] = logits.amax(-1)
            logits.sub_(largest[rows, None])
            chosen[rows] = logits.gather(1, local[rows])
            unnormalized = logits.exp() if with_entropy else logits.exp_()
            mass[rows] = unnormalized.sum(-1)
            if learns and number >= first_kept:
                kept.append(_Kept(logits, largest[rows].clone(), exponentiated=not with_entropy))
            if with_entropy:
                weighted[rows] = unnormalized.mul_(logits).sum(-1)
        if vocabulary.ranks.size > 1:
            largest = _combine(vocabulary, chosen, own, largest, mass, weighted)
        log_mass = mass.log()
        logprobs = chosen - log_mass[:, None]
        entropy = log_mass - weighted / mass if with_entropy else torch.zeros_like(mass)
        ctx.save_for_backward(hidden, weight, local, own, log_mass + largest, entropy)
        ctx.temperature, ctx.chunk_tokens, ctx.kept = temperature, chunk_tokens, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy = gradients
        hidden, weight, local, own, normalizer, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        transposed = weight.t()
        for rows in reversed(list(_chunks(len(hidden) if len(weight) else 0, ctx.chunk_tokens))):
            if ctx.kept:
                kept = ctx.kept.pop()
            else:
                logits = _tempered(hidden[rows] @ transposed, ctx.temperature)
                kept = _Kept(logits, torch.zeros_like(normalizer[rows]), exponentiated=False)
            # With x the tempered logits: d log p_t / d x_j = [t = j] − p_j,
            # and d entropy / d x_j = −p_j (log p_j + entropy).
            slope = torch.zeros_like(normalizer[rows, None])
            if grad_logprobs is not None:
                slope = slope - grad_logprobs[rows].sum(-1, keepdim=True)
            if grad_entropy is not None:
                weighted = grad_entropy[rows, None]
                log_p = kept.logprobs(normalizer[rows])
                probabilities = log_p.exp()
                grad_logits = log_p.add_(entropy[rows, None]).mul_(-weighted).add_(slope).mul_(probabilities)
            else:
                grad_logits = kept.probabilities(normalizer[rows]).mul_(slope)
            if grad_logprobs is not None:
                grad_logits.scatter_add_(1, local[rows], grad_logprobs[rows] * own[rows])
            grad_logits = _tempered(grad_logits, ctx.temperature).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                if grad_logits.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), hidden[rows])
                else:
                    grad_weight += grad_logits.t() @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _combine(
    vocabulary: VocabularyShard,
    chosen: torch.Tensor,
    own: torch.Tensor,
    largest: torch.Tensor,
    mass: torch.Tensor,
    weighted: torch.Tensor,
) -> torch.Tensor:
    """Turn the shards' numbers, in place, into those of the whole vocabulary; returns its largest logits.

    ``chosen`` ``[N, K]``, ``mass`` = Σ exp(x − m) and ``weighted`` = Σ exp(x − m) (x − m) are relative
    to m, the shard's ``largest``, before, and relative to that of the vocabulary afterwards.
    """
    whole = vocabulary.ranks.largest(largest.clone())
    shift = largest - whole
    scale = shift.exp()
    # Where a shard has no rows its shift is −inf and its sums are 0: 0 · −inf is no number.
    finite = shift.masked_fill(shift.isinf(), 0)
    weighted.add_(mass * finite).mul_(scale)
    mass.mul_(scale)
    chosen.add_(finite[:, None]).mul_(own)
    parts = torch.cat([chosen, mass[:, None], weighted[:, None]], dim=1)
    vocabulary.ranks.sum(parts)
    chosen.copy_(parts[:, :-2])
    mass.copy_(parts[:, -2])
    weighted.copy_(parts[:, -1])
    return whole
