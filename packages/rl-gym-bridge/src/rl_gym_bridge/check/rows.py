"""The rows of a check, read one by one, so that a faulty one is a finding and not the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dataset import GymRow
from ..errors import DatasetError
from ..strict_json import JsonFault, loads_strict
from ..testing.scripted_turn import ScriptError
from .scripts import FIELD, Script, scripts_of

_NOBODY = "no agent named"


class UsageError(Exception):
    """The command cannot begin as it was called."""


@dataclass(frozen=True)
class CheckedRow:
    """One line of the file.

    Attributes:
        line: from 1.
        row: the JSON object without its scripts; empty where the line is faulty.
        agent: that the row names, empty where it names none.
        scripts: rollouts to run.
        problem: why the line cannot be used, empty where it can.
    """

    line: int
    row: Mapping[str, Any]
    agent: str
    scripts: tuple[Script, ...]
    problem: str = ""


def read_rows(path: Path, scripts: Path | None = None, limit: int | None = None) -> list[CheckedRow]:
    """Up to ``limit`` rows of a JSONL file.

    Args:
        path: the file.
        scripts: JSON object with the scripts by line number or ``row_id``; they replace those in the rows.
        limit: rows at most.

    Raises:
        UsageError: a file cannot be read, holds no row, or ``scripts`` is no JSON object.
    """
    by_name = _read_scripts(scripts) if scripts else {}
    rows: list[CheckedRow] = []
    used: set[str] = set()
    for number, raw in enumerate(_read(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if limit is not None and len(rows) >= limit:
            break
        if raw.strip():
            rows.append(_row(raw, number, by_name, used))
    if not rows:
        raise UsageError(f"{path} holds no row")
    unused = sorted(set(by_name) - used)
    if unused and limit is None:
        raise UsageError(f"{scripts} has scripts for no row of {path}: {', '.join(unused)}")
    return rows


def _row(raw: bytes, number: int, by_name: Mapping[str, Any], used: set[str]) -> CheckedRow:
    try:
        parsed = loads_strict(raw.decode("utf-8"))
        if not isinstance(parsed, dict):
            problem = f"the row is a {type(parsed).__name__}, not a JSON object"
            return CheckedRow(number, {}, "", (), problem)
        script = parsed.pop(FIELD, None)
        for name in (str(number), str(parsed.get("row_id"))):
            if name in by_name:
                used.add(name)
                script = by_name[name]
        row = GymRow.from_mapping(parsed, default_agent=_NOBODY)
        return CheckedRow(number, parsed, "" if row.agent == _NOBODY else row.agent, scripts_of(script))
    except (UnicodeDecodeError, JsonFault) as error:
        return CheckedRow(number, {}, "", (), f"not valid JSON ({error})")
    except (DatasetError, ScriptError) as error:
        return CheckedRow(number, {}, "", (), str(error))


def _read_scripts(path: Path) -> dict[str, Any]:
    try:
        parsed = loads_strict(_read(path).decode("utf-8"))
    except (UnicodeDecodeError, JsonFault) as error:
        raise UsageError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{path} is no JSON object of scripts by line number or row_id")
    return parsed


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
