"""Mean 0 and deviation 1 over all trained tokens of a batch."""

from __future__ import annotations

import torch

from .group_relative import STD_EPSILON


def whiten(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``(values − mean) / (std + 1e-6)``; 0 where the weight is 0 or nothing differs.

    Denominators: the weighted mean is over Σ weights, the variance over Σ weights − 1 (0 if there is no
    more than one). With a rollout's number of trained tokens for its weight this is whitening over tokens.

    Args:
        values: ``[N]`` or ``[N, S]`` float64; anything where the weight is 0.
        weights: of the same shape, ≥ 0.
    """
    weights = weights.to(values.dtype)
    counted = weights > 0
    values = torch.where(counted, values, 0.0)
    total = weights.sum()
    if total <= 1:
        return torch.zeros_like(values)
    mean = (weights * values).sum() / total
    centred = torch.where(counted, values - mean, 0.0)
    std = ((weights * centred.square()).sum() / (total - 1)).sqrt()
    if std <= 8 * torch.finfo(values.dtype).eps * values.abs().max():
        return torch.zeros_like(values)
    return centred / (std + STD_EPSILON)
