"""Everything that can be refused is refused here, before a process is started or a file written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rl_actor_envs.errors import ActorEnvironmentError
from rl_actor_envs.runtime import make_actor_runtime_env
from rl_gym_bridge.dataset import DatasetError
from rl_gym_bridge.environment import EnvironmentDefinitionError, LocalEnvironment
from rl_gym_bridge.environments import get_environment
from rl_policy_megatron.errors import PolicyError
from rl_policy_megatron.hf_config import read_model_shape

from .config import ConfigError, JobConfig
from .conversation import load_conversation
from .demonstrations import check_maker
from .engine_plan import check_engine
from .gym_plan import GymPlan, plan_gym
from .policy_plan import check_adapters, check_layout
from .problems import Problems, load_problems
from .prompt_room import check_prompts

#: The actor of the policy, by whether the engine is in it
COLOCATED = "rl_app_core.workers.ColocatedWorker"
APART = "rl_policy_megatron.group.rank.PolicyRank"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a checked configuration resolves to on this machine.

    Attributes:
        config: as it was checked.
        problems: its rows.
        environments: in-process ones, by the name that rows give; none where a Gym plays them.
        gym: the one that plays them, if any.
    """

    config: JobConfig
    problems: Problems
    environments: dict[str, LocalEnvironment]
    gym: GymPlan | None = None


def prepare(config: JobConfig) -> Prepared:
    """Check the files, names and rows that a configuration refers to.

    Raises:
        ConfigError: naming key and remedy.
    """
    try:
        make_actor_runtime_env(COLOCATED if config.generation.engine == "megatron" else APART)
    except ActorEnvironmentError as error:
        raise ConfigError(str(error)) from error
    check_engine(config)
    if config.model.chat_template is not None and not config.model.chat_template.is_file():
        raise ConfigError(f"model.chat_template={config.model.chat_template}: there is no such file")
    if config.model.path is not None:
        _check_model(config.model.path)
        load_conversation(config.model.path, config.model.chat_template)
    context = _check_context(config)
    check_layout(config)
    check_adapters(config)
    problems, environments, gym = _played(config)
    check_prompts(config, problems, context)
    if config.warm_start.steps:
        check_maker(config.warm_start.demonstrations, problems.train, tools=gym is None)
    if len(problems.train) < config.algorithm.prompts_per_step:
        raise ConfigError(
            f"algorithm.prompts_per_step={config.algorithm.prompts_per_step} exceeds the "
            f"{len(problems.train)} distinct training problems; lower it or give more rows"
        )
    if config.algorithm.updates_per_step > config.algorithm.prompts_per_step:
        raise ConfigError(
            f"algorithm.updates_per_step={config.algorithm.updates_per_step} exceeds "
            f"algorithm.prompts_per_step={config.algorithm.prompts_per_step}; lower it"
        )
    return Prepared(config, problems, environments, gym)


def _played(config: JobConfig) -> tuple[Problems, dict[str, LocalEnvironment], GymPlan | None]:
    """The rows, and what plays them."""
    wanted = config.environment
    if wanted.gym is not None:
        problems = load_problems(config.data, wanted.gym.agent)
        return problems, {}, plan_gym(config, problems)
    _environment("environment.name", wanted.name)
    problems = load_problems(config.data, wanted.name)
    return problems, _environments(problems), None


def _environments(problems: Problems) -> dict[str, LocalEnvironment]:
    environments: dict[str, LocalEnvironment] = {}
    for row in (*problems.train, *problems.held_out):
        if row.agent not in environments:
            environments[row.agent] = _environment(f"data: agent_ref.name of row {row.row_id}", row.agent)
        try:
            environments[row.agent].check(row)
        except DatasetError as error:
            raise ConfigError(f"data: {error}") from error
    return environments


def _environment(key: str, name: str) -> LocalEnvironment:
    try:
        return get_environment(name)
    except EnvironmentDefinitionError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_context(config: JobConfig) -> int:
    model, wanted = config.model, config.generation.max_new_tokens
    if model.path is not None:
        context = read_model_shape(model.path).max_positions
    else:
        assert model.tiny is not None
        context = model.tiny.context
    generation = config.generation
    if generation.engine != "megatron":
        own = getattr(generation, generation.engine).max_model_len
        if own is not None and own > context:
            raise ConfigError(
                f"generation.{generation.engine}.max_model_len={own} exceeds the model's context of "
                f"{context} tokens; lower it or leave it out"
            )
    if wanted >= context:
        raise ConfigError(
            f"generation.max_new_tokens={wanted} leaves no room for a prompt in the model's context of "
            f"{context} tokens; lower it"
        )
    return context


def _check_model(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"model.path={path}: there is no such directory; give one in Hugging Face format")
    try:
        read_model_shape(path)
    except PolicyError as error:
        raise ConfigError(f"model.path: {error}") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path={path}: it has no *.safetensors; other weight formats are not read")
    for file in files:
        try:
            with safe_open(file, framework="numpy") as weights:
                weights.keys()
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model.path: {file} is not a safetensors file: {error}") from error
