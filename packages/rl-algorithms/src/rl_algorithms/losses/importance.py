"""Correction for engine and policy disagreeing about what was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

ImportanceCorrection = Literal["tis", "icepop"]
IMPORTANCE_CORRECTIONS: tuple[ImportanceCorrection, ...] = ("tis", "icepop")


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Token weights ``[B, S]`` without gradient, and which were out of bounds or not finite."""

    values: torch.Tensor
    truncated: torch.Tensor
    non_finite: torch.Tensor


def importance_weights(
    prev_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    kind: ImportanceCorrection,
    minimum: float,
    maximum: float,
) -> ImportanceWeights:
    """``exp(prev − generation)`` per token: ``tis`` clamps it to the bounds, ``icepop`` zeroes outside.

    A weight that is not finite becomes 0. Everything is 0 / False outside ``mask``.

    Source: truncated importance sampling, https://fengyao.notion.site/off-policy-rl; IcePop,
    https://ringtech.notion.site/icepop.
    """
    raw = torch.exp(prev_logprobs.detach() - generation_logprobs)
    finite = torch.isfinite(raw)
    outside = mask & finite & ((raw < minimum) | (raw > maximum))
    bounded = raw.clamp(minimum, maximum) if kind == "tis" else torch.where(outside, 0.0, raw)
    return ImportanceWeights(
        values=torch.where(mask & finite, bounded, 0.0),
        truncated=outside,
        non_finite=mask & ~finite,
    )
