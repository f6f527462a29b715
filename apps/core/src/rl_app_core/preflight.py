"""Everything that can be refused is refused here, before a process is started or a file written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rl_gym_bridge.environment import EnvironmentDefinitionError, LocalEnvironment
from rl_gym_bridge.environments import get_environment

from .config import ConfigError, RunConfig
from .demonstrations import check_maker
from .problems import Problems, load_problems

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a checked configuration resolves to on this machine."""

    config: RunConfig
    problems: Problems
    environments: dict[str, LocalEnvironment]


def prepare(config: RunConfig) -> Prepared:
    """Check the files, names and rows that a configuration refers to.

    Raises:
        ConfigError: naming key and remedy.
    """
    if config.model.path is not None:
        _check_model(config.model.path)
    if config.model.chat_template is not None and not config.model.chat_template.is_file():
        raise ConfigError(f"model.chat_template={config.model.chat_template}: there is no such file")
    _environment("environment.name", config.environment.name)
    problems = load_problems(config.data, config.environment.name)
    agents = sorted({row.agent for row in (*problems.train, *problems.held_out)})
    environments = {agent: _environment("data: agent_ref.name", agent) for agent in agents}
    if config.warm_start.steps:
        check_maker(config.warm_start.demonstrations, problems.train[0])
    if len(problems.train) < config.algorithm.prompts_per_step:
        raise ConfigError(
            f"algorithm.prompts_per_step={config.algorithm.prompts_per_step} exceeds the "
            f"{len(problems.train)} distinct training problems; lower it or give more rows"
        )
    return Prepared(config, problems, environments)


def _environment(key: str, name: str) -> LocalEnvironment:
    try:
        return get_environment(name)
    except EnvironmentDefinitionError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_model(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"model.path={path}: there is no such directory; give one in Hugging Face format")
    config = path / "config.json"
    if not config.is_file():
        raise ConfigError(f"model.path={path}: it has no config.json; give a Hugging Face directory")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path={path}: its config.json is not JSON: {error}") from error
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model.path={path}: it has no *.safetensors; other weight formats are not read")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model.path={path}: it has no tokenizer; copy {_TOKENIZER_FILES[0]} into it")
