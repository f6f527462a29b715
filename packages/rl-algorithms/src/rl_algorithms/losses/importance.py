"""Correction for engine and policy disagreeing about what was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

ImportanceCorrection = Literal["tis", "icepop", "seq-mask-tis"]
IMPORTANCE_CORRECTIONS: tuple[ImportanceCorrection, ...] = ("tis", "icepop", "seq-mask-tis")


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
    """``exp(prev − generation)`` per token, without gradient.

    ``tis`` clamps it to the bounds, ``icepop`` makes it 0 outside of them. ``seq-mask-tis`` looks at whole
    sequences: one whose geometric mean over its trained tokens lies outside has weight 0 on all of them, the
    others keep their tokens' weights as they are.

    A weight that is not finite becomes 0 and is in no mean. Everything is 0 / False outside ``mask``.

    Source: truncated importance sampling, https://fengyao.notion.site/off-policy-rl; IcePop,
    https://ringtech.notion.site/icepop; masked sequences, https://richardli.xyz/rl-collapse.
    """
    difference = torch.where(mask, prev_logprobs.detach() - generation_logprobs, 0.0)
    raw = torch.exp(difference)
    finite = torch.isfinite(raw)
    if kind == "seq-mask-tis":
        counted = mask & finite
        total = torch.where(counted, difference, 0.0).sum(1, keepdim=True)
        mean = torch.exp(total / counted.sum(1, keepdim=True).clamp(min=1))
        outside = mask & finite & ((mean < minimum) | (mean > maximum))
    else:
        outside = mask & finite & ((raw < minimum) | (raw > maximum))
    bounded = raw.clamp(minimum, maximum) if kind == "tis" else torch.where(outside, 0.0, raw)
    return ImportanceWeights(
        values=torch.where(mask & finite, bounded, 0.0),
        truncated=outside,
        non_finite=mask & ~finite,
    )
