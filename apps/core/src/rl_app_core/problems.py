"""Rows to train on and rows to be measured on, disjoint by content."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_gym_bridge.dataset import DatasetError, GymRow, load_rows

from .config.errors import ConfigError
from .config.sections import Data, TrainData


@dataclass(frozen=True, slots=True)
class Problems:
    """Distinct rows; no content appears in both tuples. ``repeated`` rows were left out as known already."""

    train: tuple[GymRow, ...]
    held_out: tuple[GymRow, ...]
    repeated: int = 0

    @property
    def digest(self) -> str:
        """A hash of the training rows in their order: what a resumed run must find again."""
        digest = hashlib.sha256()
        for row in self.train:
            digest.update(json.dumps(row.to_mapping(), sort_keys=True).encode())
        return digest.hexdigest()


def load_problems(data: Data, environment: str | None) -> Problems:
    """Rows of the generator or the files, split by a hash of what the policy is shown.

    The split depends on nothing but the content: not on the run's seed, the batch or the number of
    rollouts.

    Args:
        data: the configuration's section.
        environment: name of the environment that rows which name none are played in; ``None`` refuses them.

    Raises:
        ConfigError: a file, the generator or one of its options cannot be used, or a side is empty.
    """
    given = _source(data.train, environment)
    rows = _distinct(given)
    if data.held_out.path is not None:
        held_out = _distinct(_read(data.held_out.path, "data.held_out.path", environment))
        shared = sorted(set(rows) & set(held_out))
        if shared:
            raise ConfigError(
                f"data.held_out.path: {len(shared)} of its problems are also in data.train, the first being "
                f"row {held_out[shared[0]].row_id}; remove them from one side"
            )
        train = rows
    else:
        held_out = {key: row for key, row in rows.items() if _position(key) < data.held_out.share}
        train = {key: row for key, row in rows.items() if key not in held_out}
    if not train or not held_out:
        empty = "training" if not train else "held-out"
        raise ConfigError(
            f"data: no {empty} problem is left of {len(rows)}; give more rows or change held_out.share"
        )
    measured = sorted(held_out)[: data.held_out.size]
    return Problems(
        tuple(train.values()), tuple(held_out[key] for key in measured), repeated=len(given) - len(rows)
    )


def _source(train: TrainData, environment: str | None) -> list[GymRow]:
    if train.path is not None:
        return _read(train.path, "data.train.path", environment)
    if environment is None:
        raise ConfigError(
            "data.train.dataset_name: generated problems name no agent; set environment.gym.agent, or give "
            "rows that do with data.train.path"
        )
    return list(_generate(train, environment))


def _read(path: Path, key: str, environment: str | None) -> list[GymRow]:
    try:
        return load_rows(path, default_agent=environment)
    except DatasetError as error:
        hint = " (environment.gym.agent does)" if environment is None and error.field == "agent_ref" else ""
        raise ConfigError(f"{key}: {error}{hint}") from error


def _generate(train: TrainData, environment: str) -> Iterator[GymRow]:
    with warnings.catch_warnings():
        # One of the library's dependencies compares strings by identity; not ours to show.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    name = str(train.dataset_name)
    if name not in DATASETS:
        from difflib import get_close_matches

        close = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else "see the library's list"
        raise ConfigError(f"data.train.dataset_name={name!r} is not a generator of reasoning-gym; {hint}")
    try:
        items = reasoning_gym.create_dataset(name, size=train.size, seed=train.seed, **train.options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.train.options: {name} refuses them: {error}") from error
    for index in range(train.size):
        item = items[index]
        prompt = _filled(train.prompt, item, "prompt", {})
        known = {"answer": item["answer"]}
        more = {field: _filled(text, item, f"fields.{field}", known) for field, text in train.fields.items()}
        yield GymRow.from_mapping(
            {
                "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
                "agent_ref": {"type": "responses_api_agents", "name": environment},
                "answer": item["answer"],
                "metadata": item["metadata"],
                **more,
                "row_id": hashlib.sha256(prompt.encode()).hexdigest()[:16],
            }
        )


def _filled(template: str, item: Mapping[str, Any], key: str, known: Mapping[str, Any]) -> str:
    fields = {key: value for key, value in item["metadata"].items() if isinstance(value, str | int | float)}
    fields |= {"question": item["question"], **known}
    try:
        return template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"data.train.{key}={template!r}: {error}; the fields are {', '.join(sorted(fields))}"
        ) from error


def _distinct(rows: Sequence[GymRow]) -> dict[str, GymRow]:
    distinct: dict[str, GymRow] = {}
    for row in rows:
        distinct.setdefault(_content(row), row)
    return distinct


def _content(row: GymRow) -> str:
    """A hash of everything that the policy is shown, as hexadecimal digits."""
    params = row.responses_create_params
    try:
        content: Any = row.messages
    except DatasetError:
        # Not text alone. Whether that can be played is its environment's to say.
        content = [params.get("instructions"), params["input"]]
    shown = json.dumps([content, params.get("tools")], sort_keys=True)
    return hashlib.sha256(shown.encode()).hexdigest()


def _position(digest: str) -> float:
    return int(digest[:12], 16) / 16**12
