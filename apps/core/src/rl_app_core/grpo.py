"""GRPO and its relatives: from the configuration to the method and the loop that it describes."""

from __future__ import annotations

from contextlib import nullcontext

from rl_algorithms.advantages import GroupRelative
from rl_algorithms.loops import LoopSettings
from rl_algorithms.losses import ClippedPGLoss
from rl_algorithms.losses.normalization import LossError
from rl_algorithms.method import Method
from rl_algorithms.rewards import OverlongPenalty, RewardError, RewardShaping

from .config import ConfigError, GRPOConfig
from .job import Trainer


def grpo_trainer(config: GRPOConfig) -> Trainer:
    """What the shared job trains by.

    Raises:
        ConfigError: see :func:`check_settings`.
    """
    check_settings(config)
    return Trainer("grpo", loop_settings(config), lambda runtime: nullcontext(method(config)))


def check_settings(config: GRPOConfig) -> None:
    """Refuse combinations that the loss or the loop refuses.

    Raises:
        ConfigError: naming what does not go together.
    """
    try:
        method(config)
        loop_settings(config)
    except (LossError, RewardError, ValueError) as error:
        raise ConfigError(f"algorithm: {error}") from error


def method(config: GRPOConfig) -> Method:
    """Advantage and loss that the configuration describes."""
    algorithm = config.algorithm
    if algorithm.leave_one_out and algorithm.advantage != "grpo":
        raise ValueError(
            f"leave_one_out belongs to advantage=grpo, not to {algorithm.advantage}; leave it out"
        )
    advantages = {
        "grpo": GroupRelative(leave_one_out=algorithm.leave_one_out, normalize=algorithm.normalize),
        "rloo": GroupRelative(leave_one_out=True, normalize=False),
        "dr_grpo": GroupRelative(normalize=False),
    }
    return Method(advantages[algorithm.advantage], policy_loss(config))


def policy_loss(config: GRPOConfig) -> ClippedPGLoss:
    """The loss that the configuration describes."""
    algorithm = config.algorithm
    return ClippedPGLoss(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl_coefficient=algorithm.kl_coefficient,
        kl_kind=algorithm.kl_form,
        entropy_coefficient=algorithm.entropy_coefficient,
        report_entropy=algorithm.report_entropy,
        importance_correction=algorithm.importance_correction,
        importance_min=algorithm.importance_min,
        importance_max=algorithm.importance_max,
        normalization=algorithm.normalization,
        constant_length=config.generation.max_new_tokens if algorithm.normalization == "constant" else None,
    )


def loop_settings(config: GRPOConfig) -> LoopSettings:
    """The loop that the configuration describes."""
    algorithm = config.algorithm
    return LoopSettings(
        steps=algorithm.steps,
        prompts_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        learning_rate=algorithm.learning_rate,
        warmup_steps=algorithm.warmup_steps,
        decay=algorithm.decay,
        learning_rate_floor=algorithm.final_share,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.checkpointing.every,
        updates_per_step=algorithm.updates_per_step,
        shaping=reward_shaping(config),
        shuffle_rewards=algorithm.shuffle_rewards,
        filter_zero_spread=algorithm.filter_zero_spread,
        max_infra_failures=algorithm.max_infra_failures,
        max_data_failures_share=algorithm.max_data_failures_share,
        max_skipped_steps=algorithm.max_skipped_steps,
        overlong_filtering=algorithm.overlong_filtering,
        seed=config.seed,
    )


def reward_shaping(config: GRPOConfig) -> RewardShaping:
    """What the configuration does to rewards."""
    rewards = config.rewards
    overlong = None
    if rewards.overlong_buffer:
        overlong = OverlongPenalty(
            max_length=config.generation.max_new_tokens,
            buffer=rewards.overlong_buffer,
            penalty=rewards.overlong_penalty,
        )
    return RewardShaping(overlong=overlong, stop_properly_coefficient=rewards.stop_properly_coefficient)
