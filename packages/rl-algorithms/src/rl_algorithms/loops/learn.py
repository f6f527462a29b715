"""The training half of a step: scores, advantages, mini-batches, optimizer updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..advantages.base import AdvantageEstimator, AdvantageInputs
from ..batching import TrainBatch, build_train_batch
from ..method import Method
from ..needs import Needs
from ..protocols import PolicyLoss, PolicyTrainer
from .rows import seeded_permutation
from .samples import StepSamples
from .sequences import Sequences
from .settings import LoopSettings
from .state import LoopError

_MINIBATCH_KEY = 2


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What the updates of one step did.

    Attributes:
        updates: how many there were.
        metrics: ready to log.
        advantages: ``[N]`` float64, of each rollout; the mean over its sampled tokens where they differ.
    """

    updates: int
    metrics: dict[str, float]
    advantages: torch.Tensor


def learn(
    samples: StepSamples,
    method: Method,
    settings: LoopSettings,
    policy: PolicyTrainer,
    *,
    pad_token_id: int,
    step: int,
) -> UpdateReport:
    """Batch, scores, advantages and updates of one step; no update where no sample is trained.

    Raises:
        LoopError, Exception: see :func:`update_policy`.
    """
    if not samples.trained.any():
        return UpdateReport(0, {}, torch.zeros(len(samples.trajectories), dtype=torch.float64))
    sequences = Sequences.of(samples.trajectories)
    batch = build_train_batch(
        sequences.trajectories,
        torch.zeros(len(sequences.trajectories)),
        samples.trained[sequences.rollout],
        pad_token_id,
    )
    batch = _asked_of_the_teacher(batch, sequences, method)
    batch = _scored(batch, policy, method.advantage.needs)
    advantages = _advantages(batch, samples, sequences, method)
    batch = batch.with_advantages(advantages)
    updates, metrics = update_policy(
        policy,
        method.loss,
        batch,
        updates=settings.updates_per_step,
        learning_rate=settings.schedule(step),
        step=step,
        seed=settings.seed,
    )
    return UpdateReport(updates, metrics, _per_sequence(advantages, batch.token_mask)[sequences.first])


def _asked_of_the_teacher(batch: TrainBatch, sequences: Sequences, method: Method) -> TrainBatch:
    teacher, needs = method.teacher, method.needs
    if teacher is None or not needs.asks_teacher:
        return batch
    agents = [trajectory.agent for trajectory in sequences.trajectories]
    if needs.teacher:
        batch = batch.with_logprobs(teacher=teacher.logprobs(batch, agents))
    if needs.teacher_topk:
        batch = batch.with_teacher_topk(*teacher.topk_logprobs(batch, agents, needs.teacher_topk))
    return batch


def _advantages(
    batch: TrainBatch, samples: StepSamples, sequences: Sequences, method: Method
) -> torch.Tensor:
    advantages = _estimated(batch, samples, sequences, method.advantage)
    if method.advantage_clip is not None:
        advantages = advantages.clamp(-method.advantage_clip, method.advantage_clip)
    if method.overrides:
        whole = batch.with_advantages(advantages).token_advantages
        valid = samples.valid[sequences.rollout].unsqueeze(1)
        advantages = method.overrides(whole, sequences.trajectories) * valid
    return advantages


def _estimated(
    batch: TrainBatch, samples: StepSamples, sequences: Sequences, estimator: AdvantageEstimator
) -> torch.Tensor:
    """Of every sequence. A rollout enters its baseline once, however often it forked, and its forks are
    worth what it is worth; where no reward is used, every sequence speaks for itself."""
    if estimator.uses_rewards and sequences.forked:
        own = batch.select(sequences.first.nonzero().flatten().tolist()).with_own_denominators()
        rollouts = torch.arange(len(samples.trajectories))
    else:
        own, rollouts = batch, sequences.rollout
    groups = samples.group_ids
    found = estimator(
        AdvantageInputs(
            rewards=samples.shaped[rollouts],
            group_ids=[groups[index] for index in rollouts.tolist()],
            valid=samples.valid[rollouts],
            batch=own,
            components={name: values[rollouts] for name, values in samples.components.items()},
        )
    )
    _check_advantages(found, own, samples.valid[rollouts], type(estimator).__name__)
    if own is batch:
        return found
    if found.ndim != 1:
        raise LoopError(
            f"{type(estimator).__name__} values each token by itself, and a rollout of this step has forks, "
            "whose tokens are others: use an advantage per rollout, or an environment that does not fork"
        )
    return found[sequences.rollout]


def _check_advantages(found: torch.Tensor, batch: TrainBatch, valid: torch.Tensor, name: str) -> None:
    """That an estimator, which may be somebody's own, gave numbers of the right shape.

    Raises:
        LoopError: it did not; names it.
    """
    shape = tuple(found.shape)
    if shape not in ((len(batch),), tuple(batch.token_mask.shape)):
        raise LoopError(
            f"{name} returned advantages of shape {list(shape)} for {len(batch)} rollouts of "
            f"{batch.token_mask.shape[1]} tokens: return one number for each rollout, or for each token"
        )
    looked_at = found[valid] if found.ndim == 1 else found[batch.token_mask & valid.unsqueeze(1)]
    if not bool(torch.isfinite(looked_at).all()):
        raise LoopError(
            f"{name} returned an advantage that is no finite number: the rewards are out of all bounds, or "
            "it divides by a spread of 0"
        )


def _per_sequence(advantages: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    advantages = advantages.detach().double()
    if advantages.ndim == 1:
        return advantages
    return torch.where(sampled, advantages, 0.0).sum(1) / sampled.sum(1).clamp(min=1)


def update_policy(
    policy: PolicyTrainer,
    loss_fn: PolicyLoss,
    batch: TrainBatch,
    *,
    updates: int,
    learning_rate: float,
    step: int,
    seed: int,
) -> tuple[int, dict[str, float]]:
    """Score every mini-batch under the weights of the step's start, then train them in turn.

    Returns:
        How many updates there were, and metrics: ``loss`` and ``grad_norm`` are means over the updates;
        ``first_ratio_min`` and ``first_ratio_max`` belong to the first update, where the ratio must be 1;
        the loss's other metrics are those of the last update; ``logprob_gap_mean`` and
        ``logprob_gap_max``, of abs(policy − engine) in nats, and ``engine_ratio_mean``,
        ``engine_ratio_min`` and ``engine_ratio_max``, of exp(policy − engine), compare engine and policy
        over the step's trained tokens that have a gradient: those of rows whose advantage is 0 are not
        scored unless the loss moves them all the same.

    Raises:
        LoopError: loss or gradient norm is not finite.
        Exception: whatever the policy raises, with a note that names step and update.
    """
    minibatches = _minibatches(batch, loss_fn, updates=updates, step=step, seed=seed)
    scored = [_scored(part, policy, loss_fn.needs) for part in minibatches]
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
        return 0, {}
    metrics = dict(reports[-1])
    for name in ("loss", "grad_norm"):
        metrics[name] = sum(report[name] for report in reports) / len(reports)
    for name in ("ratio_min", "ratio_max"):
        if name in reports[0]:
            metrics[f"first_{name}"] = reports[0][name]
    return len(reports), metrics | _engine_gap(scored)


def _minibatches(
    batch: TrainBatch, loss_fn: PolicyLoss, *, updates: int, step: int, seed: int
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


def _scored(batch: TrainBatch, policy: PolicyTrainer, needs: Needs) -> TrainBatch:
    """The batch with the policy's own numbers that are needed and not there yet."""
    prev = needs.prev and batch.prev_logprobs is None
    reference = needs.reference and batch.reference_logprobs is None
    return batch.with_logprobs(
        prev=policy.logprobs(batch) if prev else None,
        reference=policy.reference_logprobs(batch) if reference else None,
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
