"""Gym-format rows: one JSON object per line, with the prompt, the agent and the verifier's fields."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DatasetError
from .messages import check_input, to_chat_messages
from .strict_json import JsonFault, loads_strict

__all__ = ["DatasetError", "GymRow", "load_rows", "write_rows"]

_PARAMS = "responses_create_params"
_AGENT = "agent_ref"
_ROW_ID = "row_id"


@dataclass(frozen=True)
class GymRow:
    """One task.

    Attributes:
        responses_create_params: the OpenAI Responses request; ``input`` is a string or a list of
            messages, everything else is passed on untouched.
        agent_ref: ``{"name": …}`` of the agent or environment that runs the row.
        verifier: every other field of the row: what the environment needs to judge an answer.
        row_id: identity of the row in its data set. It comes from the row's ``row_id``, or, where it
            has none, from its content.
    """

    responses_create_params: Mapping[str, Any]
    agent_ref: Mapping[str, Any]
    verifier: Mapping[str, Any]
    row_id: str

    @property
    def agent(self) -> str:
        """Name of the agent or environment."""
        return self.agent_ref["name"]

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The prompt as chat messages with plain text (``instructions`` first, as a system message).

        Raises:
            DatasetError: the input holds something that is not text (an image, an earlier tool call).
        """
        return to_chat_messages(self.responses_create_params, row_id=self.row_id)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, default_agent: str | None = None) -> GymRow:
        """A row from its JSON object; the mapping is neither changed nor kept.

        Args:
            mapping: the parsed object.
            default_agent: agent of a row that has no ``agent_ref``; without it such a row is refused.

        Raises:
            DatasetError: a field is missing or has the wrong type.
        """
        if not isinstance(mapping, Mapping):
            raise DatasetError(
                f"the row is a {type(mapping).__name__}, not a JSON object",
                remedy=f'write one object per line: {{"{_PARAMS}": …, "{_AGENT}": …, …}}',
            )
        params = _checked_params(mapping)
        agent_ref = _checked_agent(mapping, default_agent)
        verifier = {key: value for key, value in mapping.items() if key not in (_PARAMS, _AGENT, _ROW_ID)}
        explicit = mapping.get(_ROW_ID)
        if explicit is None:
            row_id = _content_id(params, agent_ref, verifier)
        elif isinstance(explicit, (str, int)) and not isinstance(explicit, bool) and str(explicit).strip():
            row_id = str(explicit)
        else:
            raise DatasetError(
                f"it is {explicit!r}, not a non-empty string or an integer",
                field=_ROW_ID,
                remedy="give the row a unique string, or leave the field out to derive one from the content",
            )
        return cls(
            copy.deepcopy(dict(params)), copy.deepcopy(dict(agent_ref)), copy.deepcopy(verifier), row_id
        )

    def to_mapping(self) -> dict[str, Any]:
        """The JSON object of the row; ``row_id`` is in it unless it is the one derived from the content."""
        mapping: dict[str, Any] = {
            _PARAMS: dict(self.responses_create_params),
            _AGENT: dict(self.agent_ref),
            **self.verifier,
        }
        if self.row_id != _content_id(self.responses_create_params, self.agent_ref, self.verifier):
            mapping[_ROW_ID] = self.row_id
        return mapping


def load_rows(path: str | os.PathLike[str], *, default_agent: str | None = None) -> list[GymRow]:
    """Every row of a JSONL file, in order; blank lines are skipped.

    Rows of equal content without a ``row_id`` become different rows (``<id>``, ``<id>#2``, …).

    Args:
        path: the file, UTF-8.
        default_agent: agent of rows that have no ``agent_ref``.

    Raises:
        DatasetError: the file cannot be read, is empty, or holds a faulty line; it names path, line,
            field and remedy.
    """
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DatasetError(
            f"cannot be read ({error.strerror or error})",
            path=source,
            remedy="check the path; it must name a readable JSONL file",
        ) from error
    rows: list[GymRow] = []
    lines: dict[str, int] = {}
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        row, derived = _parse_line(raw, source, number, default_agent)
        if row.row_id in lines:
            if not derived:
                raise DatasetError(
                    f"{row.row_id!r} is already the id of line {lines[row.row_id]}",
                    path=source,
                    line=number,
                    field=_ROW_ID,
                    remedy="give every row an id of its own, or leave the field out",
                )
            row = _next_free_id(row, lines)
        lines[row.row_id] = number
        rows.append(row)
    if not rows:
        raise DatasetError("holds no row", path=source, remedy="write one JSON object per line")
    return rows


def write_rows(path: str | os.PathLike[str], rows: Iterable[GymRow]) -> int:
    """Write rows as JSONL that :func:`load_rows` gives back equal; returns their number.

    The file appears whole or not at all.

    Raises:
        DatasetError: two rows have one id, a value is not JSON, or the file cannot be written.
    """
    target = Path(path)
    lines: list[str] = []
    seen: set[str] = set()
    for number, row in enumerate(rows, start=1):
        if row.row_id in seen:
            raise DatasetError(
                f"{row.row_id!r} appears twice",
                path=target,
                line=number,
                field=_ROW_ID,
                remedy="give every row an id of its own",
            )
        seen.add(row.row_id)
        try:
            lines.append(json.dumps(row.to_mapping(), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"row {row.row_id!r} cannot be written as JSON ({error})",
                path=target,
                line=number,
                remedy="keep to strings, finite numbers, booleans, null, lists and objects",
            ) from error
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        temporary.write_bytes("".join(lines).encode("utf-8"))
        os.replace(temporary, target)
    except (OSError, UnicodeEncodeError) as error:
        temporary.unlink(missing_ok=True)
        raise DatasetError(
            f"cannot be written ({error})",
            path=target,
            remedy="check that the directory exists and is writable and that the texts are valid Unicode",
        ) from error
    return len(lines)


def _parse_line(raw: bytes, source: Path, number: int, default_agent: str | None) -> tuple[GymRow, bool]:
    """The row of one line, and whether its id was derived from its content."""
    try:
        parsed = loads_strict(raw.decode("utf-8"))
    except (UnicodeDecodeError, JsonFault) as error:
        raise DatasetError(
            f"not valid JSON ({error})",
            path=source,
            line=number,
            remedy="write one JSON object per line, in UTF-8",
        ) from error
    try:
        row = GymRow.from_mapping(parsed, default_agent=default_agent)
    except DatasetError as error:
        raise error.located(source, number) from error.__cause__
    return row, parsed.get(_ROW_ID) is None


def _next_free_id(row: GymRow, taken: Mapping[str, int]) -> GymRow:
    occurrence = 2
    while (row_id := f"{row.row_id}#{occurrence}") in taken:
        occurrence += 1
    return GymRow(row.responses_create_params, row.agent_ref, row.verifier, row_id)


def _content_id(params: Mapping[str, Any], agent_ref: Mapping[str, Any], verifier: Mapping[str, Any]) -> str:
    canonical = json.dumps(
        [dict(params), dict(agent_ref), dict(verifier)], sort_keys=True, separators=(",", ":"), default=str
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]


def _checked_params(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    example = f'{{"{_PARAMS}": {{"input": "What is 2 + 2?"}}}}'
    if _PARAMS not in mapping:
        raise DatasetError("it is missing", field=_PARAMS, remedy=f"add it, for example {example}")
    params = mapping[_PARAMS]
    if not isinstance(params, Mapping):
        raise DatasetError(
            f"it is a {type(params).__name__}, not an object", field=_PARAMS, remedy=f"write it as {example}"
        )
    check_input(params, field=_PARAMS)
    return params


def _checked_agent(mapping: Mapping[str, Any], default_agent: str | None) -> Mapping[str, Any]:
    remedy = f'write "{_AGENT}": {{"name": "<environment>"}}, or name a default agent when loading'
    if mapping.get(_AGENT) is None:
        if default_agent is None:
            raise DatasetError("it is missing", field=_AGENT, remedy=remedy)
        return {"name": default_agent}
    agent_ref = mapping[_AGENT]
    if not isinstance(agent_ref, Mapping):
        raise DatasetError(f"it is a {type(agent_ref).__name__}, not an object", field=_AGENT, remedy=remedy)
    name = agent_ref.get("name")
    if not isinstance(name, str) or not name:
        raise DatasetError(f"it is {name!r}, not a non-empty string", field=f"{_AGENT}.name", remedy=remedy)
    return agent_ref
