"""From logits to tokens: the exact distribution that is sampled from, and one draw of it per row.

The order of the settings is temperature, then top-k, then top-p on what top-k left. All arithmetic on
log-probabilities is float32, all cumulative sums are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sampling_logprobs(
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
) -> Tensor:
    """Log-probabilities of the distribution that a request with these settings is sampled from.

    Args:
        logits: ``[B, V]``, any floating dtype; columns that must never be sampled hold ``-inf``.
        temperature: > 0; a number or ``[B]``.
        top_k: candidates to keep, 0 is off; a number or ``[B]`` integers. Tokens that tie with the last
            candidate are kept as well, so that the answer depends on the logits alone.
        top_p: nucleus mass in (0, 1]; a number or ``[B]``. Kept is the smallest set of most likely tokens
            whose mass reaches it, lower ids first among equals; at least one token.

    Returns:
        ``[B, V]`` float32, normalised over the kept tokens, ``-inf`` elsewhere.
    """
    logits = _tempered(logits.float(), temperature)
    wants_k = bool((top_k > 0).any()) if isinstance(top_k, Tensor) else top_k > 0
    wants_p = bool((top_p < 1).any()) if isinstance(top_p, Tensor) else top_p < 1
    if wants_p:
        logits = _keep_nucleus(logits, top_k, top_p)
    elif wants_k:
        logits = _keep_top_k(logits, top_k)
    return torch.log_softmax(logits, dim=-1)


def sampling_probabilities(logits: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """The unfiltered distribution of :func:`sampling_logprobs` as probabilities, at half its cost.

    Args:
        logits: ``[B, V]``, any floating dtype; columns that must never be sampled hold ``-inf``.
        temperature: > 0; a number or ``[B]``.

    Returns:
        ``[B, V]`` float32, each row of sum 1.
    """
    return torch.softmax(_tempered(logits.float(), temperature), dim=-1)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: one token per row, never one of probability zero.

    Args:
        probabilities: ``[B, V]``; they need not be normalised.
        uniforms: ``[B]`` float64 in [0, 1), one independent number per row. Equal numbers give equal tokens
            whatever the other rows hold.

    Returns:
        ``[B]`` int64 token ids.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # For every float64 u < 1, u * total rounds to less than total. So the first place where the sum exceeds
    # it exists and is one where the sum grows, that is a token with mass.
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
    # Reached by rows of NaN only, which the caller has to tell by their log-probability.
    return tokens.clamp_(max=probabilities.shape[-1] - 1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token per row and its log-probability under the untempered, unfiltered distribution.

    Args:
        logits: ``[B, V]``, any floating dtype.

    Returns:
        ``[B]`` int64 token ids and ``[B]`` float32 log-probabilities.
    """
    logits = logits.float()
    best, tokens = logits.max(dim=-1)
    return tokens, best - torch.logsumexp(logits, dim=-1)


def _column(setting: Tensor | float, like: Tensor) -> Tensor | float:
    return setting.to(like.dtype)[:, None] if isinstance(setting, Tensor) else setting


def _tempered(logits: Tensor, temperature: Tensor | float) -> Tensor:
    if not isinstance(temperature, Tensor) and temperature == 1:
        return logits
    # Shifting by the maximum first keeps tiny temperatures from overflowing to inf - inf.
    return (logits - logits.amax(dim=-1, keepdim=True)) / _column(temperature, logits)


def _k_per_row(top_k: Tensor | int, logits: Tensor) -> Tensor:
    rows, vocabulary = logits.shape
    k = torch.as_tensor(top_k, device=logits.device).expand(rows)
    return torch.where(k > 0, k, vocabulary).clamp(max=vocabulary)


def _keep_top_k(logits: Tensor, top_k: Tensor | int) -> Tensor:
    k = _k_per_row(top_k, logits)
    off = k >= logits.shape[-1]
    widest = int(torch.where(off, 1, k).max())
    best = logits.topk(widest, dim=-1).values
    threshold = best.gather(1, (k.clamp(max=widest) - 1)[:, None])
    return logits.masked_fill((logits < threshold) & ~off[:, None], float("-inf"))


def _keep_nucleus(logits: Tensor, top_k: Tensor | int, top_p: Tensor | float) -> Tensor:
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    k = _k_per_row(top_k, logits)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, (k - 1)[:, None]), float("-inf"))
    mass = torch.softmax(ordered, dim=-1).double()
    before = mass.cumsum(dim=-1) - mass
    p = torch.as_tensor(top_p, dtype=torch.float64, device=logits.device).expand(logits.shape[0])[:, None]
    # A row with top_p = 1 keeps everything, even where rounding lifts the running sum to 1 early.
    ordered = ordered.masked_fill((before >= p) & (p < 1), float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter(1, tokens, ordered)
