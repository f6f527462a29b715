"""From per-token terms to a micro-batch's share of the global loss."""

from __future__ import annotations

from typing import Literal

import torch

from ..batching import TrainBatch

Normalization = Literal["token", "sequence", "constant"]
NORMALIZATIONS: tuple[Normalization, ...] = ("token", "sequence", "constant")


class LossError(ValueError):
    """A loss whose settings contradict each other, or that lacks an input it needs."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` with 0 outside ``mask``; NaN and inf there neither show nor poison the gradient."""
    return torch.where(mask, values, 0.0)


def global_share(
    terms: torch.Tensor,
    mask: torch.Tensor,
    batch: TrainBatch,
    normalization: Normalization,
    constant_length: int | None = None,
) -> torch.Tensor:
    """This micro-batch's share of the global loss, a differentiable scalar; 0 if nothing is valid.

    Denominators, all of the *whole* batch and carried by ``batch``:

    - ``token``: Σ m·term / ``global_valid_tokens``;
    - ``sequence``: Σ over rows of the row's masked mean / ``global_valid_samples``;
    - ``constant``: Σ m·term / (``global_valid_samples`` · ``constant_length``).

    Args:
        terms: ``[B, S]``.
        mask: ``[B, S]`` bool.
    """
    terms = masked(terms, mask)
    if normalization == "sequence":
        per_row = terms.sum(1) / mask.sum(1).clamp(min=1)
        return per_row.sum() / (batch.global_valid_samples or 1.0)
    if normalization == "constant":
        if constant_length is None:
            raise LossError("normalization 'constant' needs constant_length")
        return terms.sum() / ((batch.global_valid_samples or 1.0) * constant_length)
    return terms.sum() / (batch.global_valid_tokens or 1.0)
