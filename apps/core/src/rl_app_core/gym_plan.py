"""From the configuration to the Gym that a run starts, and everything that can be refused before it does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_actor_envs.errors import ActorEnvironmentError
from rl_actor_envs.runtime import make_actor_runtime_env
from rl_gym_bridge.config import SECTION, EffortLevel, NemoGymConfig, build_nemo_gym_config
from rl_gym_bridge.dataset import DatasetError, GymRow
from rl_gym_bridge.factory import NEMO_GYM_ACTOR
from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.interpreter import find_gym_interpreter
from rl_gym_bridge.request_body import GenerationOverrides
from rl_gym_bridge.rows import NemoGymDataset, collate_rollout_requests

from .config import ConfigError, JobConfig
from .problems import Problems

_KEY = "policy_api_key"


@dataclass(frozen=True, slots=True)
class GymPlan:
    """The Gym of one run.

    Attributes:
        section: ``env.nemo_gym`` of :func:`~rl_gym_bridge.factory.spinup_nemo_gym_actor`, but for its
            ``work_dir`` where none was chosen.
        model_name: under which the engine serves the policy.
        sampling: of training.
        greedy: of measurements.
        effort_levels: that rows may ask for.
        agents: that rows name, with a row that does.
        step_timeout_s: for all rollouts of a call.
        shutdown_timeout_s: for Gym to end by itself.
    """

    section: Mapping[str, Any]
    model_name: str
    sampling: GenerationOverrides
    greedy: GenerationOverrides
    effort_levels: tuple[EffortLevel, ...]
    agents: Mapping[str, str]
    step_timeout_s: float
    shutdown_timeout_s: float


def plan_gym(config: JobConfig, problems: Problems) -> GymPlan:
    """What the configuration asks for, checked as far as it can be without a Gym that runs.

    Args:
        config: of a run with ``environment.gym``.
        problems: its rows.

    Raises:
        ConfigError: a setting or a row that Gym, the bridge or this machine refuses; names key and remedy.
    """
    gym = config.environment.gym
    assert gym is not None
    try:
        make_actor_runtime_env(NEMO_GYM_ACTOR)
        interpreter = find_gym_interpreter(None if gym.python is None else str(gym.python))
    except ActorEnvironmentError as error:
        raise ConfigError(f"environment.gym: {error}") from error
    except GymConfigError as error:
        raise ConfigError(f"environment.gym.python: {error}") from error
    section = {
        **gym.settings,
        **_token(config),
        "config_paths": list(gym.config_paths),
        # Found here, so that an actor elsewhere does not look for another one.
        "python": str(interpreter.python),
        "search_folder": str(gym.folder or Path.cwd()),
        "num_gpu_nodes": gym.num_gpu_nodes,
        "max_concurrency": gym.max_concurrency,
        "start_timeout_s": gym.start_timeout_s,
        "rollout_timeout_s": gym.rollout_timeout_s,
        "shutdown_timeout_s": gym.shutdown_timeout_s,
    }
    if gym.work_dir is not None:
        section["work_dir"] = str(gym.work_dir)
    settings = _bridge(section, config)
    plan = GymPlan(
        section,
        model_name=settings.model_name,
        sampling=_overrides(config, config.generation.temperature),
        greedy=_overrides(config, 0.0),
        effort_levels=settings.effort_levels,
        agents={row.agent: row.row_id for row in reversed((*problems.train, *problems.held_out))},
        step_timeout_s=gym.step_timeout_s,
        shutdown_timeout_s=gym.shutdown_timeout_s,
    )
    for fault in _faults(config, plan, problems):
        raise ConfigError(fault)
    return plan


def _overrides(config: JobConfig, temperature: float) -> GenerationOverrides:
    return GenerationOverrides(
        temperature=temperature,
        top_p=1.0,
        max_new_tokens=config.generation.max_new_tokens,
        seeded=temperature > 0,
    )


def _token(config: JobConfig) -> dict[str, str]:
    """What Gym has to carry to the engine, if anything; it stands in no file of the run."""
    gym, variable = config.environment.gym, config.generation.server.token_variable
    if variable is None:
        return {}
    if gym is not None and _KEY in gym.settings:
        raise ConfigError(
            f"environment.gym.settings has {_KEY!r}, and generation.server.token_variable={variable} says "
            "what requests carry; leave the first out"
        )
    return {_KEY: os.environ.get(variable, "")}


def _bridge(section: Mapping[str, Any], config: JobConfig) -> NemoGymConfig:
    try:
        return build_nemo_gym_config(
            {"nemo_gym": section},
            base_urls=[],
            model_name=config.generation.server.model_name,
            enable_router_replay=False,
            use_fastokens=False,
        )
    except GymConfigError as error:
        raise ConfigError(str(error).replace(SECTION, "environment.gym.settings")) from error


def _faults(config: JobConfig, plan: GymPlan, problems: Problems) -> Iterator[str]:
    for key, rows in (("data.train", problems.train), ("data.held_out", problems.held_out)):
        yield from _unsendable(key, rows, config, plan)
    if config.generation.server.tool_parser is None:
        yield from _uncallable((*problems.train, *problems.held_out), config)


def _unsendable(key: str, rows: Sequence[GymRow], config: JobConfig, plan: GymPlan) -> Iterator[str]:
    """Every request of a step is made once, so that none is refused in the middle of a run."""
    try:
        NemoGymDataset(rows)
        for generation in (plan.sampling, plan.greedy):
            collate_rollout_requests(
                rows,
                generation=generation,
                group_size=1,
                step=0,
                seed=config.seed,
                effort_levels=plan.effort_levels,
            )
    except DatasetError as error:
        yield f"{key}: {error}"
    except GymConfigError as error:
        yield f"environment.gym.settings: {error}"


def _uncallable(rows: Sequence[GymRow], config: JobConfig) -> Iterator[str]:
    for row in rows:
        if row.responses_create_params.get("tools"):
            remedy = (
                "set generation.server.tool_parser, such as hermes"
                if config.generation.engine == "vllm"
                else "use generation.engine=vllm, which has parsers of them"
            )
            yield (
                f"data: row {row.row_id} offers tools, and without a parser of tool calls they stay in the "
                f"text and no tool is ever called; {remedy}, or take them out of the rows"
            )
            return
