"""What a policy-gradient loss reports, each number with its own denominator."""

from __future__ import annotations

import math

import torch

from ..kl import KLEstimate, kl_estimate
from ..metrics import ExpMean, Max, Mean, Metric, Min, Sum
from .importance import ImportanceWeights


@torch.no_grad()
def policy_metrics(
    *,
    loss: torch.Tensor,
    mask: torch.Tensor,
    logprobs: torch.Tensor,
    prev_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    ratio: torch.Tensor,
    clipped: torch.Tensor | None,
    weights: ImportanceWeights | None,
    kl: KLEstimate | None,
    entropy: torch.Tensor | None,
) -> dict[str, Metric]:
    """Metrics of one micro-batch, finite whatever it holds. All arguments ``[B, S]`` but ``loss``.

    | name | value over the valid tokens unless said otherwise |
    |---|---|
    | ``loss`` | the share of the global loss; shares add up |
    | ``ratio_mean``, ``ratio_min``, ``ratio_max`` | of exp(lp − prev) |
    | ``clipped_share`` | tokens whose term a clip decides (absent without a PPO ratio) |
    | ``kl``, ``kl_input_clamped``, ``kl_output_clamped`` | mean estimate and counts (with a reference) |
    | ``entropy`` | mean, nats (when computed) |
    | ``generation_gap_mean``, ``generation_gap_max`` | of abs(prev − generation), nats |
    | ``gen_kl_error`` | mean k3 estimate of KL(generation ‖ prev) |
    | ``token_mult_prob_error`` | exp(mean abs(prev − generation)) |
    | ``generation_non_finite`` | tokens left out of the four above: the difference is not finite |
    | ``importance_weight_mean``, ``importance_weight_max``, ``importance_truncated_share``, \
``importance_non_finite`` | with a correction |
    | ``valid_tokens``, ``valid_samples`` | counts |
    """
    gap = prev_logprobs - generation_logprobs
    comparable = mask & torch.isfinite(gap)
    gap = torch.where(comparable, gap, 0.0)
    sums: dict[str, torch.Tensor] = {
        "tokens": mask.sum(),
        "samples": mask.any(1).sum(),
        "loss": loss,
        "ratio": _total(ratio, mask),
        "comparable": comparable.sum(),
        "gap": _total(gap.abs(), comparable),
        "gap_kl": _total(kl_estimate(generation_logprobs, prev_logprobs, comparable).values, comparable),
        "ratio_max": _extreme(ratio, mask, -math.inf).max(),
        "ratio_min": _extreme(ratio, mask, math.inf).min(),
        "gap_max": _extreme(gap.abs(), comparable, -math.inf).max(),
    }
    if clipped is not None:
        sums["clipped"] = (clipped & mask).sum()
    if kl is not None:
        sums |= {
            "kl": _total(kl.values, mask),
            "kl_input": kl.input_clamped.sum(),
            "kl_output": kl.output_clamped.sum(),
        }
    if entropy is not None:
        sums["entropy"] = _total(entropy, mask)
    if weights is not None:
        sums |= {
            "weight": _total(weights.values, mask),
            "weight_max": _extreme(weights.values, mask, -math.inf).max(),
            "weight_truncated": weights.truncated.sum(),
            "weight_non_finite": weights.non_finite.sum(),
        }
    # One transfer from the device for all of them.
    numbers = dict(zip(sums, torch.stack([v.double() for v in sums.values()]).tolist(), strict=True))
    return _named(numbers)


def _named(numbers: dict[str, float]) -> dict[str, Metric]:
    tokens, comparable = numbers["tokens"], numbers["comparable"]
    metrics: dict[str, Metric] = {
        "loss": Sum(numbers["loss"]),
        "ratio_mean": Mean(numbers["ratio"], tokens),
        "ratio_min": Min(numbers["ratio_min"]),
        "ratio_max": Max(numbers["ratio_max"]),
        "generation_gap_mean": Mean(numbers["gap"], comparable),
        "generation_gap_max": Max(numbers["gap_max"]),
        "gen_kl_error": Mean(numbers["gap_kl"], comparable),
        "token_mult_prob_error": ExpMean(numbers["gap"], comparable),
        "generation_non_finite": Sum(tokens - comparable),
        "valid_tokens": Sum(tokens),
        "valid_samples": Sum(numbers["samples"]),
    }
    if "clipped" in numbers:
        metrics["clipped_share"] = Mean(numbers["clipped"], tokens)
    if "kl" in numbers:
        metrics["kl"] = Mean(numbers["kl"], tokens)
        metrics["kl_input_clamped"] = Sum(numbers["kl_input"])
        metrics["kl_output_clamped"] = Sum(numbers["kl_output"])
    if "entropy" in numbers:
        metrics["entropy"] = Mean(numbers["entropy"], tokens)
    if "weight" in numbers:
        metrics["importance_weight_mean"] = Mean(numbers["weight"], tokens)
        metrics["importance_weight_max"] = Max(numbers["weight_max"])
        metrics["importance_truncated_share"] = Mean(numbers["weight_truncated"], tokens)
        metrics["importance_non_finite"] = Sum(numbers["weight_non_finite"])
    return metrics


def _total(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, 0.0).double().sum()


def _extreme(values: torch.Tensor, mask: torch.Tensor, empty: float) -> torch.Tensor:
    """Masked-in values with one ``empty`` appended, so that a reduction over nothing is defined."""
    return torch.cat([torch.where(mask, values, empty).flatten(), values.new_full((1,), empty)])
