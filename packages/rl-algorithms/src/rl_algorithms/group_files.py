"""Finished groups on disk: JSON alone, exact to the bit, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_gym_bridge.trajectory import (
    FailureKind,
    RolloutFailure,
    RoutedExperts,
    StopReason,
    Trajectory,
    Turn,
)

from .checkpoint_files import CheckpointCorruptError, CheckpointError, fsync_directory
from .replay import Group, Missing

logger = logging.getLogger(__name__)

_ANCHOR = re.compile(r"after_(0|[1-9][0-9]*)")
_PART = re.compile(r"part_[0-9]{8}\.json")
_FORMAT = 1


def groups_to_json(groups: Sequence[Group]) -> dict[str, Any]:
    """A JSON object that :func:`groups_from_json` restores exactly. Numbers by the token are packed."""
    return {"format": _FORMAT, "groups": [_group(group) for group in groups]}


def groups_from_json(content: Mapping[str, Any]) -> list[Group]:
    """The groups that :func:`groups_to_json` wrote.

    Raises:
        CheckpointCorruptError: it is not of that form.
    """
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}, this version reads {_FORMAT}")
        return [_to_group(entry) for entry in content["groups"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"finished groups cannot be read ({type(error).__name__}: {error}); resume with the version that "
            "wrote them"
        ) from error


class GroupStore:
    """Finished groups beside the checkpoints that they belong to, by the checkpoint's step.

    Layout: ``DIRECTORY/after_N/part_K.json``, each with a hash of its content. One process writes.

    Args:
        directory: made when the first groups are written.
        on_ignored: told in one line of every damaged part that is passed over; logged as a warning too.
    """

    def __init__(self, directory: Path, *, on_ignored: Callable[[str], None] | None = None) -> None:
        self._directory = Path(directory)
        self._on_ignored = on_ignored

    def write(self, anchor: int, groups: Sequence[Group]) -> None:
        """Put groups beside the checkpoint of step ``anchor``; they are on disk afterwards.

        Raises:
            CheckpointError: they cannot be written.
        """
        folder = self._directory / f"after_{anchor}"
        try:
            body = json.dumps(groups_to_json(groups), allow_nan=False)
        except ValueError as error:
            raise CheckpointError(
                f"finished groups after step {anchor} hold what cannot be written as JSON: {error}"
            ) from error
        text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number = len(self._parts(folder))
            target = folder / f"part_{number:08}.json"
            while target.exists():
                number += 1
                target = folder / f"part_{number:08}.json"
            temporary = folder / f".{target.name}.{uuid.uuid4().hex[:8]}"
            try:
                with temporary.open("w", encoding="utf-8") as handle:
                    handle.write(text)
                    handle.flush()
                    os.fsync(handle.fileno())
                os.rename(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_directory(folder)
            fsync_directory(self._directory)
        except OSError as error:
            raise CheckpointError(
                f"finished groups after step {anchor} in {self._directory} cannot be written: {error}"
            ) from error

    def read(self, anchor: int) -> list[Group]:
        """All whole groups beside the checkpoint of step ``anchor``, oldest first."""
        found: list[Group] = []
        for part in self._parts(self._directory / f"after_{anchor}"):
            try:
                content = json.loads(part.read_text(encoding="utf-8"))
                body = content["body"]
                if hashlib.sha256(body.encode()).hexdigest() != content["sha256"]:
                    raise ValueError("its content is not what was written")
                found += groups_from_json(json.loads(body))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
                self._ignore(f"ignoring the damaged {part}: {error}; its rows are played again")
        return found

    def keep_only(self, anchor: int) -> None:
        """Forget what belongs to other checkpoints than that of step ``anchor``.

        Older ones hold what they need themselves; later ones belong to steps that are lost.
        """
        if not self._directory.is_dir():
            return
        for folder in self._directory.iterdir():
            match = _ANCHOR.fullmatch(folder.name)
            if match and int(match.group(1)) != anchor:
                shutil.rmtree(folder, ignore_errors=True)

    def _parts(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            return []
        return sorted(entry for entry in folder.iterdir() if _PART.fullmatch(entry.name))

    def _ignore(self, message: str) -> None:
        message = " ".join(message.split())
        logger.warning("%s", message)
        if self._on_ignored is not None:
            self._on_ignored(message)


def _group(group: Group) -> dict[str, Any]:
    return {
        "position": group.position,
        "oldest": group.oldest,
        "newest": group.newest,
        "order": group.order,
        "stragglers": group.stragglers,
        "outcomes": [_outcome(outcome) for outcome in group.outcomes],
    }


def _to_group(entry: Mapping[str, Any]) -> Group:
    return Group(
        position=int(entry["position"]),
        outcomes=tuple(_to_outcome(outcome) for outcome in entry["outcomes"]),
        oldest=int(entry["oldest"]),
        newest=int(entry["newest"]),
        order=int(entry["order"]),
        stragglers=int(entry["stragglers"]),
    )


def _outcome(outcome: Any) -> dict[str, Any]:
    match outcome:
        case Trajectory():
            return {"sample": _trajectory(outcome)}
        case RolloutFailure():
            return {
                "failure": {
                    "group_id": outcome.group_id,
                    "rollout_id": outcome.rollout_id,
                    "agent": outcome.agent,
                    "kind": outcome.kind.value,
                    "error": outcome.error,
                }
            }
        case Missing():
            return {"missing": {"index": outcome.index, "why": outcome.why}}
    raise TypeError(f"a {type(outcome).__name__} is no outcome of a rollout")


def _to_outcome(entry: Mapping[str, Any]) -> Trajectory | RolloutFailure | Missing:
    ((kind, content),) = entry.items()
    if kind == "sample":
        return _to_trajectory(content)
    if kind == "failure":
        return RolloutFailure(**{**content, "kind": FailureKind(content["kind"])})
    if kind == "missing":
        return Missing(**content)
    raise ValueError(f"there is no outcome {kind!r}")


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    experts = trajectory.routed_experts
    return {
        "turns": [
            {
                "prompt": _packed(turn.prompt_token_ids, "<i8"),
                "sampled": _packed(turn.generation_token_ids, "<i8"),
                "logprobs": _packed(turn.generation_logprobs, "<f8"),
                "invalid_tool_call": turn.invalid_tool_call,
                "malformed_thinking": turn.malformed_thinking,
            }
            for turn in trajectory.turns
        ],
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason.value,
        "group_id": trajectory.group_id,
        "rollout_id": trajectory.rollout_id,
        "agent": trajectory.agent,
        "weight_versions": _packed(trajectory.weight_versions, "<i8"),
        "reward_components": dict(trajectory.reward_components),
        "metrics": dict(trajectory.metrics),
        "text": trajectory.text,
        "routed_experts": None
        if experts is None
        else [
            experts.dtype,
            experts.tokens,
            experts.layers,
            experts.top_k,
            base64.b64encode(experts.data).decode(),
        ],
        "forks": [_trajectory(fork) for fork in trajectory.forks],
    }


def _to_trajectory(content: Mapping[str, Any]) -> Trajectory:
    turns = tuple(
        Turn(
            _unpacked(turn["prompt"], "<i8"),
            _unpacked(turn["sampled"], "<i8"),
            _unpacked(turn["logprobs"], "<f8"),
            invalid_tool_call=turn["invalid_tool_call"],
            malformed_thinking=turn["malformed_thinking"],
        )
        for turn in content["turns"]
    )
    experts = content["routed_experts"]
    return Trajectory(
        turns=turns,
        reward=content["reward"],
        stop_reason=StopReason(content["stop_reason"]),
        group_id=content["group_id"],
        rollout_id=content["rollout_id"],
        agent=content["agent"],
        weight_versions=_unpacked(content["weight_versions"], "<i8"),
        reward_components=dict(content["reward_components"]),
        metrics=dict(content["metrics"]),
        text=content["text"],
        routed_experts=None if experts is None else _experts(*experts),
        forks=tuple(_to_trajectory(fork) for fork in content["forks"]),
    )


def _experts(dtype: str, tokens: int, layers: int, top_k: int, data: str) -> RoutedExperts:
    return RoutedExperts(dtype, tokens, layers, top_k, base64.b64decode(data, validate=True))


def _packed(values: Sequence[float], kind: str) -> str:
    return base64.b64encode(np.asarray(values, dtype=kind).tobytes()).decode("ascii")


def _unpacked(text: str, kind: str) -> tuple[Any, ...]:
    return tuple(np.frombuffer(base64.b64decode(text, validate=True), dtype=kind).tolist())
