"""Rotary position embedding from a model's own frequencies (Su et al. 2021, half-split form)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RotaryTable:
    """Cosines and signed sines of every position that a batch can reach, each ``[positions, R]``."""

    def __init__(self, rotary: Any, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            rotary: the model's ``RotaryEmbedding``.
            positions: how many positions to cover, from 0.
            dtype: of the queries and keys; megatron rounds the table to it before multiplying.
            device: where they are.
        """
        angles = rotary.get_freqs_non_repeated(positions).to(device)
        self._cosines = angles.cos().repeat(1, 2).to(dtype)
        # The second half of a vector is negated before it takes the place of the first one.
        self._sines = torch.cat((-angles.sin(), angles.sin()), dim=1).to(dtype)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Positions ``0 .. count-1`` for ``[B, count, groups, heads, D]`` vectors."""
        return self._cosines[:count, None, None], self._sines[:count, None, None]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[B]`` positions for ``[B, groups, heads, D]`` vectors."""
        return self._cosines[positions, None, None], self._sines[positions, None, None]


def rotate(vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first ``R`` entries of the last dimension; the rest passes through.

    Args:
        vectors: ``[..., D]``, ``R <= D``.
        cosines: broadcastable to ``[..., R]``, from :class:`RotaryTable`.
        sines: the same shape.
    """
    width = cosines.shape[-1]
    if width == vectors.shape[-1]:
        return torch.addcmul(vectors * cosines, vectors.roll(width // 2, -1), sines)
    return torch.cat((rotate(vectors[..., :width], cosines, sines), vectors[..., width:]), dim=-1)
