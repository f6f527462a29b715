"""An acceptance case: a row of an environment, what the model says to it, and all that must come of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..strict_json import JsonFault, loads_strict
from .scripted_turn import ScriptedTurn


class CaseError(ValueError):
    """A case whose row is missing or is not the one that it was written for."""


@dataclass(frozen=True)
class RowPin:
    """A row inside an installed Gym.

    Attributes:
        path: the JSONL file, relative to the folder that Gym's configurations are relative to.
        line: which line, from 0.
        sha256: of the line as it stands in the file, without its end.
    """

    path: str
    line: int
    sha256: str

    def read(self, root: Path) -> dict[str, Any]:
        """The row.

        Args:
            root: folder of the installed Gym that holds ``resources_servers``.

        Raises:
            CaseError: the file or the line is missing, is no JSON object, or is another one than pinned.
        """
        file = root / self.path
        try:
            raw = file.read_bytes().split(b"\n")[self.line]
        except (OSError, IndexError) as error:
            raise CaseError(
                f"{file} has no line {self.line}: {error}; review the row and its goldens"
            ) from error
        found = hashlib.sha256(raw).hexdigest()
        if found != self.sha256:
            raise CaseError(
                f"line {self.line} of {file} has SHA-256 {found}, the case was written for {self.sha256}; "
                f"this Gym has another row there: review the row and its goldens"
            )
        try:
            row = loads_strict(raw.decode("utf-8"))
        except (UnicodeDecodeError, JsonFault) as error:
            raise CaseError(f"line {self.line} of {file} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise CaseError(f"line {self.line} of {file} is no JSON object")
        return row


@dataclass(frozen=True)
class AcceptanceCase:
    """A rollout with a known end.

    Attributes:
        name: ``ENVIRONMENT/accepted`` or ``ENVIRONMENT/rejected``; the script of the model has the same name.
        environment: name of the resources server.
        config_path: Gym configuration that starts it.
        agent: the agent that must run the row.
        row: where the row is.
        turns: what the policy says, call by call.
        reward: what the environment must give.
        answer: what must stand in Gym's answer, by dotted path (``judge_evaluations.0.verdict_label``).
        absent: dotted paths that must be missing or null there.
        tool_outputs: after each turn, the output of each of its tool calls, as the model gets it.
        judge_calls: how often the judge is asked.
    """

    name: str
    environment: str
    config_path: str
    agent: str
    row: RowPin
    turns: tuple[ScriptedTurn, ...]
    reward: float
    answer: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    tool_outputs: tuple[tuple[str, ...], ...] = ()
    judge_calls: int = 0

    @property
    def policy_calls(self) -> int:
        """How often the policy is asked: once per turn."""
        return len(self.turns)
