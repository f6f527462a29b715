"""Rotary position embedding: the part of a model's config.json that decides its frequencies.

megatron-core knows Llama-3's rescaling with fixed parameters only, so the frequencies are computed
here from the model's own and handed to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama-3's stretch of the slow frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Base and optional rescaling of the rotary frequencies."""

    theta: float
    scaling: Llama3Scaling | None = None

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """``[head_dim / 2]`` float32 angular frequencies, in radians per token.

        Source: RoPE (Su et al., 2021, equation 15); the rescaling keeps wavelengths shorter than
        ``original / high_freq_factor``, divides by ``factor`` those longer than
        ``original / low_freq_factor``, and blends linearly in between (Llama 3.1 release notes).
        """
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**exponent)
        if self.scaling is None:
            return inverse
        scaling = self.scaling
        wavelength = 2 * math.pi / inverse
        original = scaling.original_max_position_embeddings
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        blend = (original / wavelength - low) / (high - low)
        blended = (1 - blend) * inverse / scaling.factor + blend * inverse
        stretched = torch.where(wavelength > original / low, inverse / scaling.factor, blended)
        return torch.where(wavelength < original / high, inverse, stretched)
