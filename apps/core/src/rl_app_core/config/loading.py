"""From a recipe and ``key=value`` words to a validated configuration."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import ConfigError, closest_path
from .job import GRPOConfig, JobConfig
from .synonyms import synonym

_Config = TypeVar("_Config", bound=JobConfig)


def load_config(recipe: Path | None, overrides: Sequence[str] = (), *, model: type[_Config]) -> _Config:
    """Read a YAML recipe, apply the overrides in order and validate the whole.

    Args:
        recipe: a YAML file, or ``None`` for defaults alone.
        overrides: words ``dotted.key=value``; the value is read as YAML.
        model: the configuration of the application.

    Raises:
        ConfigError: the file, a key or a value cannot be used.
    """
    values = _read_yaml(recipe) if recipe is not None else {}
    for word in overrides:
        _apply_override(values, word)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        items = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        raise ConfigError("; ".join(_explain(item, model) for item in items)) from error


def to_yaml(config: JobConfig) -> str:
    """The whole configuration, defaults included, as YAML that :func:`load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def known_paths(model: type[BaseModel] = GRPOConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted path of the configuration, sections included."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        section = section_of(field.annotation)
        if section is not None:
            yield from known_paths(section, f"{path}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, ``None`` for a plain value."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"recipe {path} does not exist; give the path of a YAML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from error
    try:
        values = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"recipe {path} is not YAML: {where}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {path} must hold a mapping of sections, not a {type(values).__name__}")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that gives one key twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _apply_override(values: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"{word!r} is not an override; write key=value, such as policy.packing=true; "
            "a recipe is chosen with -c"
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: the value {text!r} is not YAML; quote it") from error
    target = values
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        inner = target.get(parent)
        if inner is None:
            section: dict[str, Any] = {}
            inner = target[parent] = section
        elif not isinstance(inner, dict):
            path = ".".join(parents[: depth + 1])
            raise ConfigError(f"{key}: {path} is a value, not a section; it has no keys below it")
        target = inner
    target[leaf] = value


_MOST_UNKNOWN_KEYS = 4


def _unknown(path: str, model: type[JobConfig]) -> str:
    hint = closest_path(path, known_paths(model))
    remedy = f"did you mean {hint}?" if hint else f"`{model.command} show-config` lists every key"
    return f"{path} is not a setting; {remedy}"


def _leaves(path: str, given: Any) -> Iterator[str]:
    """The keys below one that is not known, which say more about what was meant than it does."""
    if not isinstance(given, dict) or not given or synonym(path):
        yield path
        return
    for key, value in given.items():
        yield from _leaves(f"{path}.{key}", value)


def _explain(item: ErrorDetails, model: type[JobConfig]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    given = item.get("input")
    if item["type"] == "extra_forbidden":
        keys = list(_leaves(path, given))
        shown = "; ".join(_unknown(key, model) for key in keys[:_MOST_UNKNOWN_KEYS])
        return shown + ("; …" if len(keys) > _MOST_UNKNOWN_KEYS else "")
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if item["type"] == "value_error" or isinstance(given, (dict, BaseModel)):
        return f"{path}: {message}" if path else message
    return f"{path}={given!r}: {message}"
