"""From the configuration to the controller that it describes."""

from __future__ import annotations

import math
from dataclasses import replace

from rl_algorithms.controller import (
    ControllerSettings,
    InOrder,
    ReadyFirst,
    RetryPolicy,
    Sampler,
    WeightFifo,
    Windowed,
)
from rl_algorithms.loops import LoopError
from rl_algorithms.loops.asynchronous import check_asynchronous
from rl_app_core import grpo
from rl_app_core.config import ConfigError, SingleControllerConfig
from rl_app_core.job import Trainer
from rl_app_core.plugins import made_from

from .asynchronous import Asynchronous

_SAMPLERS = ("in_order", "windowed", "ready_first", "weight_fifo")


def trainer(config: SingleControllerConfig) -> Trainer:
    """What the shared job trains by: the method of GRPO, the loop of the controller.

    Raises:
        ConfigError: see :func:`check_settings`.
    """
    check_settings(config)
    return replace(grpo.grpo_trainer(config), phase="async", loop=Asynchronous(config, controller_settings))


def check_settings(config: SingleControllerConfig) -> None:
    """Refuse combinations that method, loop or controller refuse.

    Raises:
        ConfigError: naming what does not go together.
    """
    grpo.check_settings(config)
    try:
        check_asynchronous(grpo.loop_settings(config), grpo.method(config))
        controller_settings(config, rows=config.algorithm.prompts_per_step)
    except LoopError as error:
        raise ConfigError(f"algorithm: {error}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"async: {error}") from error


def controller_settings(config: SingleControllerConfig, *, rows: int) -> ControllerSettings:
    """The controller that the configuration describes.

    Args:
        config: of the run.
        rows: how many there are to train on.

    Raises:
        ConfigError, ValueError: settings that cannot be meant.
    """
    own, training = config.async_, config.algorithm
    steps = training.steps
    if training.max_epochs is not None:
        steps = min(steps, training.max_epochs * rows // training.prompts_per_step)
    return ControllerSettings(
        steps=steps,
        prompts_per_step=training.prompts_per_step,
        group_size=training.group_size,
        max_staleness=own.max_staleness,
        sampler=sampler(config),
        max_running=own.max_running_groups,
        retry=RetryPolicy(own.infra_retries, own.data_retries, own.retry_delay_s, own.retry_delay_max_s),
        straggler=own.straggler_policy,
        straggler_timeout_s=own.straggler_timeout_s,
        min_batch_fraction=own.min_batch_fraction,
        max_replays=own.max_row_replays,
        rollout_timeout_s=own.rollout_timeout_s,
        stall_timeout_s=own.stall_timeout_s,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.checkpointing.every,
        save_groups_every_s=own.save_groups_every_s,
        seed=config.seed,
    )


def sampler(config: SingleControllerConfig) -> Sampler:
    """Which groups a step trains.

    Raises:
        ConfigError: a class of one's own that cannot be used.
    """
    own = config.async_
    match own.sampler:
        case "in_order":
            return InOrder()
        case "windowed":
            # 1.1 steps of 50 rows are 55, and 56 by what floating point makes of them.
            return Windowed(math.ceil(round(own.window_steps * config.algorithm.prompts_per_step, 6)))
        case "ready_first":
            return ReadyFirst()
        case "weight_fifo":
            return WeightFifo()
    return made_from("async.sampler", own.sampler, own.sampler_options, known=_SAMPLERS, members=("choose",))
