"""From the configuration to the loop, as far as all methods share it."""

from __future__ import annotations

from rl_algorithms.loops import LoopSettings

from .config import JobConfig


def shared_loop_settings(config: JobConfig) -> LoopSettings:
    """Steps, schedule, limits, measurements and checkpoints.

    Raises:
        ValueError: settings out of range, or at odds.
    """
    training = config.algorithm
    return LoopSettings(
        steps=training.steps,
        prompts_per_step=training.prompts_per_step,
        group_size=training.group_size,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        decay=training.decay,
        learning_rate_floor=training.final_share,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.checkpointing.every,
        updates_per_step=training.updates_per_step,
        max_infra_failures=training.max_infra_failures,
        max_data_failures_share=training.max_data_failures_share,
        max_skipped_steps=training.max_skipped_steps,
        max_epochs=training.max_epochs,
        stop_at=config.evaluation.stop_at,
        seed=config.seed,
    )
