"""GRPO and its relatives: from the configuration to the method and the loop that it describes."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from rl_algorithms.advantages import (
    GDPO,
    AdvantageError,
    AdvantageEstimator,
    GroupRelative,
    KLInReward,
    MessageOverrides,
    ReinforcePlusPlus,
)
from rl_algorithms.loops import LoopError, LoopSettings
from rl_algorithms.loops.limits import check_method
from rl_algorithms.losses import ClippedPGLoss, LossError
from rl_algorithms.method import Method, MethodError
from rl_algorithms.protocols import PolicyLoss
from rl_algorithms.rewards import (
    LinearScaling,
    OverlongPenalty,
    RewardError,
    RewardPenalties,
    RewardShaping,
)

from .compose import Runtime
from .config import ConfigError, GRPOConfig
from .job import Trainer
from .loop_plan import shared_loop_settings
from .plugins import carry, made_from

_ADVANTAGES = ("grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "gdpo")
_LOSS = "clipped_pg"


def grpo_trainer(config: GRPOConfig) -> Trainer:
    """What the shared job trains by.

    Raises:
        ConfigError: see :func:`check_settings`.
    """
    check_settings(config)

    def chosen(runtime: Runtime) -> AbstractContextManager[Method]:
        made = method(config)
        carry(made.advantage, made.loss)
        return nullcontext(made)

    return Trainer("grpo", loop_settings(config), chosen)


def check_settings(config: GRPOConfig) -> None:
    """Refuse combinations that advantage, loss or loop refuse.

    Raises:
        ConfigError: naming what does not go together.
    """
    try:
        check_method(loop_settings(config), method(config))
    except ConfigError:
        raise
    except (AdvantageError, LossError, LoopError, MethodError, RewardError, ValueError) as error:
        section = "rewards" if isinstance(error, RewardError) else "algorithm"
        raise ConfigError(f"{section}: {_in_keys(str(error))}") from error


# What the library calls otherwise than the configuration does.
_KEYS = {
    "sequence_ratio": "objective=gspo",
    "force_on_policy_ratio": "objective=on_policy",
    "disable_ppo_ratio": "objective=reinforce",
    "cispo": "objective=cispo",
    "kl_kind": "kl_form",
    "constant_length": "generation.max_new_tokens",
}


def _in_keys(text: str) -> str:
    for name, key in _KEYS.items():
        text = re.sub(rf"(?<![\w=]){name}\b", key, text)
    return text


def method(config: GRPOConfig) -> Method:
    """Advantage and loss that the configuration describes.

    Raises:
        ConfigError, AdvantageError, LossError, MethodError, ValueError: settings that cannot be meant.
    """
    algorithm = config.algorithm
    advantage = _advantage(config)
    if algorithm.kl_in == "reward":
        if not algorithm.kl_coefficient:
            raise ValueError("kl_in=reward has no effect without kl_coefficient: give one, or leave it out")
        advantage = KLInReward(advantage, algorithm.kl_coefficient, algorithm.kl_form)
    return Method(
        advantage,
        policy_loss(config),
        overrides=MessageOverrides(
            algorithm.invalid_tool_call_advantage, algorithm.malformed_thinking_advantage
        ),
        advantage_clip=algorithm.advantage_clip,
    )


def _advantage(config: GRPOConfig) -> AdvantageEstimator:
    algorithm, name = config.algorithm, config.algorithm.advantage
    options = algorithm.advantage_options
    if algorithm.leave_one_out and name != "grpo":
        raise ValueError(f"leave_one_out belongs to advantage=grpo, not to {name}; leave it out")
    if not algorithm.normalize and name != "grpo":
        raise ValueError(f"normalize=false belongs to advantage=grpo, not to {name}; leave it out")
    if not algorithm.group_baseline and name != "reinforce_plus_plus":
        raise ValueError(
            f"group_baseline=false belongs to advantage=reinforce_plus_plus, not to {name}; leave it out"
        )
    if options and name in _ADVANTAGES and name != "gdpo":
        raise ValueError(f"advantage_options are of gdpo or of a class of your own, not of {name}")
    if name == "grpo":
        return GroupRelative(leave_one_out=algorithm.leave_one_out, normalize=algorithm.normalize)
    if name == "rloo":
        return GroupRelative(leave_one_out=True, normalize=False)
    if name == "dr_grpo":
        return GroupRelative(normalize=False)
    if name == "reinforce_plus_plus":
        return ReinforcePlusPlus(group_baseline=algorithm.group_baseline)
    if name == "gdpo":
        if options.keys() - {"weights"}:
            raise ValueError(f"advantage_options of gdpo are weights alone, got {', '.join(sorted(options))}")
        return GDPO(**options)
    return made_from(
        "algorithm.advantage",
        name,
        options,
        known=_ADVANTAGES,
        members=("needs", "uses_rewards", "__call__"),
    )


def policy_loss(config: GRPOConfig) -> PolicyLoss:
    """The loss that the configuration describes.

    Raises:
        ConfigError, LossError, ValueError: settings that cannot be meant.
    """
    algorithm = config.algorithm
    if algorithm.loss != _LOSS:
        return made_from(
            "algorithm.loss",
            algorithm.loss,
            algorithm.loss_options,
            known=(_LOSS,),
            members=("needs", "trains_zero_advantage_rows", "__call__"),
        )
    if algorithm.loss_options:
        raise ValueError(
            "loss_options are of a class of your own; clipped_pg is described by the keys of algorithm"
        )
    return ClippedPGLoss(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        disable_ppo_ratio=algorithm.objective == "reinforce",
        force_on_policy_ratio=algorithm.objective == "on_policy",
        sequence_ratio=algorithm.objective == "gspo",
        cispo=algorithm.objective == "cispo",
        kl_coefficient=algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0,
        kl_kind=algorithm.kl_form,
        entropy_coefficient=algorithm.entropy_coefficient,
        report_entropy=algorithm.report_entropy,
        positive_nll_coefficient=algorithm.positive_nll_coefficient,
        importance_correction=algorithm.importance_correction,
        importance_min=algorithm.importance_min,
        importance_max=algorithm.importance_max,
        normalization=algorithm.normalization,
        constant_length=config.generation.max_new_tokens if algorithm.normalization == "constant" else None,
    )


def loop_settings(config: GRPOConfig) -> LoopSettings:
    """The loop that the configuration describes.

    Raises:
        RewardError, ValueError: settings that cannot be meant.
    """
    algorithm = config.algorithm
    return replace(
        shared_loop_settings(config),
        shaping=reward_shaping(config),
        shuffle_rewards=algorithm.shuffle_rewards,
        filter_zero_spread=algorithm.filter_zero_spread,
        dynamic_sampling=algorithm.dynamic_sampling,
        max_generation_rounds=algorithm.max_generation_rounds,
        overlong_filtering=algorithm.overlong_filtering,
    )


def reward_shaping(config: GRPOConfig) -> RewardShaping:
    """What the configuration does to rewards."""
    rewards = config.rewards
    scaling, penalties = rewards.scaling, rewards.penalties
    overlong = None
    if rewards.overlong_buffer:
        overlong = OverlongPenalty(
            max_length=config.generation.max_new_tokens,
            buffer=rewards.overlong_buffer,
            penalty=rewards.overlong_penalty,
        )
    return RewardShaping(
        scaling=None
        if scaling is None
        else LinearScaling(scaling.source_min, scaling.source_max, scaling.target_min, scaling.target_max),
        overlong=overlong,
        stop_properly_coefficient=rewards.stop_properly_coefficient,
        penalties=RewardPenalties(
            penalties.invalid_tool_call, penalties.malformed_thinking, penalties.truncated
        ),
    )
