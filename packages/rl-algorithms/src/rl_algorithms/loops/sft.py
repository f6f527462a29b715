"""Supervised fine-tuning: the warm start before reinforcement learning, and a loop of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..batching import TrainBatch
from ..losses import SFTLoss
from ..protocols import LossFunction, MetricsLogger, PolicyTrainer
from ..schedules import LearningRateSchedule
from .state import LoopError


@dataclass(frozen=True, slots=True)
class SFTSettings:
    """How long and how fast.

    Raises:
        ValueError: fewer than one step.
    """

    steps: int
    schedule: LearningRateSchedule

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True, slots=True)
class SFTResult:
    """``tokens`` counts trained tokens; ``loss`` is that of the last step, NaN if there was none."""

    steps_done: int
    stopped: bool
    loss: float
    tokens: int
    seconds: float


def run_sft(
    *,
    settings: SFTSettings,
    policy: PolicyTrainer,
    batch_for_step: Callable[[int], TrainBatch],
    loss_fn: LossFunction | None = None,
    metrics_logger: MetricsLogger | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    first_step: int = 1,
) -> SFTResult:
    """One update per step on ``batch_for_step(step)``, steps ``first_step`` to ``settings.steps``.

    ``batch_for_step`` should be a pure function of the step: then a run that loads its policy and
    starts at ``first_step`` continues exactly.

    Raises:
        LoopError: a loss or gradient norm that is not finite.
    """
    loss_fn = SFTLoss() if loss_fn is None else loss_fn
    began = time.perf_counter()
    done, tokens, loss, stopped = first_step - 1, 0, math.nan, False
    for step in range(first_step, settings.steps + 1):
        if should_stop():
            stopped = True
            break
        batch = batch_for_step(step)
        learning_rate = settings.schedule(step)
        report = policy.train(batch, loss_fn, learning_rate=learning_rate)
        for name in ("loss", "grad_norm"):
            if not math.isfinite(report[name]):
                raise LoopError(f"supervised step {step}: {name} is {report[name]}; lower the learning rate")
        done, loss = step, report["loss"]
        tokens += int(batch.global_valid_tokens)
        metrics = {**report, "learning_rate": learning_rate, "tokens": batch.global_valid_tokens}
        if metrics_logger is not None:
            metrics_logger.log(step, metrics)
        if on_step is not None:
            on_step(step, metrics)
    return SFTResult(
        steps_done=done, stopped=stopped, loss=loss, tokens=tokens, seconds=time.perf_counter() - began
    )
