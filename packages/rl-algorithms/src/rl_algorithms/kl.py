"""Per-token estimates of the KL divergence to a reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KLKind = Literal["k1", "k2", "k3"]
KL_KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True)
class KLEstimate:
    """Estimates and which of them were clamped; all ``[B, S]``, 0 / False outside the mask."""

    values: torch.Tensor
    input_clamped: torch.Tensor
    output_clamped: torch.Tensor


def kl_estimate(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    kind: KLKind = "k3",
    input_clamp: float = 20.0,
    output_clamp: float = 10.0,
) -> KLEstimate:
    """With ``d = reference − logprobs``: k1 = −d, k2 = d²/2, k3 = eᵈ − 1 − d.

    No reduction, hence no denominator. The gradient flows through ``logprobs``; where a clamp
    binds it is 0. Entries outside ``mask`` may hold anything, NaN and inf included.

    Args:
        logprobs: ``[B, S]``, current policy, differentiable.
        reference_logprobs: ``[B, S]``, frozen policy.
        mask: ``[B, S]`` bool.
        input_clamp: bound on |d|, so that k3 cannot overflow.
        output_clamp: bound on the absolute estimate.

    Raises:
        ValueError: an unknown kind.

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    difference = torch.where(mask, reference_logprobs, 0.0) - torch.where(mask, logprobs, 0.0)
    bounded = difference.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        estimate = -bounded
    elif kind == "k2":
        estimate = bounded.square() / 2
    elif kind == "k3":
        # expm1 keeps k3 exact where the policies are close and e^d − 1 would cancel.
        estimate = torch.expm1(bounded) - bounded
    else:
        raise ValueError(f"KL estimator {kind!r} is unknown; choose one of {', '.join(KL_KINDS)}")
    return KLEstimate(
        values=estimate.clamp(-output_clamp, output_clamp),
        input_clamped=difference.abs() > input_clamp,
        output_clamped=estimate.abs() > output_clamp,
    )
