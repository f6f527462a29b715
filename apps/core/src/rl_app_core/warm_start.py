"""The supervised phase before reinforcement learning or distillation."""

from __future__ import annotations

import random

from rl_algorithms.batching import TrainBatch, build_sft_batch
from rl_algorithms.loops import SFTSettings, run_sft
from rl_algorithms.schedules import LearningRateSchedule

from .compose import Runtime
from .demonstrations import demonstrate
from .interrupts import StopRequest
from .policy_plan import algorithm_optimizer
from .preflight import Prepared
from .reporting import RunReporter


def warm_start_batch(prepared: Prepared, runtime: Runtime, step: int) -> TrainBatch:
    """The demonstrations of one supervised step: a pure function of the seed and the step."""
    config = prepared.config
    warm = config.warm_start
    rng = random.Random(f"{config.seed}/warm-start/{step}")
    share = next(phase.share for phase in warm.phases if step <= phase.until_step)
    rows = rng.choices(prepared.problems.train, k=warm.batch_size)
    examples = [
        demonstrate(
            warm.demonstrations, row, prepared.environments.get(row.agent), share, rng, runtime.conversation
        )
        for row in rows
    ]
    return build_sft_batch(examples, runtime.conversation.pad_token_id)


def warm_start(prepared: Prepared, runtime: Runtime, reporter: RunReporter, stop: StopRequest) -> None:
    """Show the policy its demonstrations, if the configuration asks for any; then a fresh optimizer.

    Raises:
        Interrupted: a signal asked to stop.
    """
    config = prepared.config
    warm = config.warm_start
    if warm.steps:
        schedule = LearningRateSchedule(
            peak=warm.learning_rate,
            warmup_steps=warm.warmup_steps,
            decay="cosine",
            total_steps=warm.steps,
            floor=warm.final_share,
        )
        reporter.begin_phase("warm start", warm.steps)
        result = run_sft(
            settings=SFTSettings(warm.steps, schedule),
            policy=runtime.policy,
            batch_for_step=lambda step: warm_start_batch(prepared, runtime, step),
            on_step=lambda step, metrics: reporter.advance("warm start", step, {"loss": metrics["loss"]}),
            should_stop=lambda: stop.requested,
        )
        reporter.end_phase()
        if result.stopped:
            raise stop.interrupted(f"stopped in the warm start after {result.steps_done} steps")
        runtime.policy.reset_optimizer(algorithm_optimizer(config))
