"""The training half of a step: mini-batches, log-probabilities, optimizer updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..batching import TrainBatch
from ..protocols import PolicyGradientLoss, PolicyTrainer
from .rows import seeded_permutation
from .state import LoopError

_MINIBATCH_KEY = 2


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What the updates of one step did; ``metrics`` are ready to log."""

    updates: int
    metrics: dict[str, float]


def update_policy(
    policy: PolicyTrainer,
    loss_fn: PolicyGradientLoss,
    batch: TrainBatch,
    *,
    updates: int,
    learning_rate: float,
    step: int,
    seed: int,
) -> UpdateReport:
    """Score every mini-batch under the weights of the step's start, then train them in turn.

    Metrics: ``loss`` and ``grad_norm`` are means over the updates; ``first_ratio_min`` and
    ``first_ratio_max`` belong to the first update, where the ratio must be 1; the loss's other
    metrics are those of the last update; ``logprob_gap_mean`` and ``logprob_gap_max``, of
    abs(policy − engine) in nats, and ``engine_ratio_mean``, ``engine_ratio_min`` and ``engine_ratio_max``,
    of exp(policy − engine), compare engine and policy over every trained token of the step.

    Raises:
        LoopError: loss or gradient norm is not finite.
        Exception: whatever the policy raises, with a note that names step and update.
    """
    minibatches = _minibatches(batch, loss_fn, updates=updates, step=step, seed=seed)
    scored = [_score(part, policy, loss_fn) for part in minibatches]
    reports: list[dict[str, float]] = []
    for part in scored:
        try:
            report = policy.train(part, loss_fn, learning_rate=learning_rate)
        except Exception as error:
            error.add_note(f"step {step}, update {len(reports) + 1}: the policy failed to train")
            raise
        for name in ("loss", "grad_norm"):
            if not math.isfinite(report[name]):
                raise LoopError(
                    f"step {step}, update {len(reports) + 1}: {name} is {report[name]}; the weights are no "
                    "longer to be trusted: resume from the last checkpoint with a lower learning rate"
                )
        reports.append(report)
    if not reports:
        return UpdateReport(0, {})
    metrics = dict(reports[-1])
    for name in ("loss", "grad_norm"):
        metrics[name] = sum(report[name] for report in reports) / len(reports)
    for name in ("ratio_min", "ratio_max"):
        if name in reports[0]:
            metrics[f"first_{name}"] = reports[0][name]
    return UpdateReport(len(reports), metrics | _engine_gap(scored))


def _minibatches(
    batch: TrainBatch, loss_fn: PolicyGradientLoss, *, updates: int, step: int, seed: int
) -> list[TrainBatch]:
    parts = [batch]
    if updates > 1:
        order = seeded_permutation(len(batch), seed, step, _MINIBATCH_KEY)
        parts = [
            batch.select(sorted(chunk.tolist())).with_own_denominators()
            for chunk in np.array_split(order, updates)
        ]
    keep = loss_fn.trains_zero_advantage_rows
    moving = [part.without_zero_gradient_rows(keep_zero_advantages=keep) for part in parts]
    return [part for part in moving if len(part)]


def _score(batch: TrainBatch, policy: PolicyTrainer, loss_fn: PolicyGradientLoss) -> TrainBatch:
    return batch.with_logprobs(
        prev=policy.logprobs(batch) if loss_fn.uses_prev_logprobs else None,
        reference=policy.reference_logprobs(batch) if loss_fn.uses_reference_logprobs else None,
    )


def _engine_gap(batches: list[TrainBatch]) -> dict[str, float]:
    differences = [
        (batch.prev_logprobs - batch.generation_logprobs)[batch.loss_mask]
        for batch in batches
        if batch.prev_logprobs is not None
    ]
    if not differences:
        return {}
    difference = torch.cat(differences).double()
    gap, ratio = difference.abs(), difference.exp()
    return {
        "logprob_gap_mean": float(gap.mean()),
        "logprob_gap_max": float(gap.max()),
        "engine_ratio_mean": float(ratio.mean()),
        "engine_ratio_min": float(ratio.min()),
        "engine_ratio_max": float(ratio.max()),
    }
