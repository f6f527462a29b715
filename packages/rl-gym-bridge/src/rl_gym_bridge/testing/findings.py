"""What a check saw, one named finding at a time, written for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is, in words.
        passed: whether it is as it has to be.
        expected: what it has to be, shortened.
        got: what it is, shortened.
    """

    name: str
    passed: bool
    expected: str = ""
    got: str = ""

    @classmethod
    def equal(cls, name: str, expected: Any, got: Any) -> Finding:
        """Whether two JSON values, or sequences of numbers, are equal; ``1`` and ``True`` are not."""
        if _same(expected, got):
            return cls(name, True, shown(expected), shown(got))
        where, wanted, found = first_difference(expected, got)
        prefix = f"{where}: " if where else ""
        return cls(name, False, prefix + shown(wanted), prefix + shown(found))

    @classmethod
    def holds(cls, name: str, passed: bool, *, expected: str, got: Any) -> Finding:
        """Whether a condition holds."""
        return cls(name, passed, expected, shown(got))

    def __str__(self) -> str:
        if self.passed:
            return f"ok    {self.name}"
        return f"WRONG {self.name}\n        expected {self.expected}\n        got      {self.got}"


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""Stands where a document has no value."""


@dataclass(frozen=True, slots=True)
class CaseReport:
    """Everything that was seen of one rollout.

    Attributes:
        name: of the case.
        findings: in the order in which they were looked at.
        seconds: that the rollout took.
    """

    name: str
    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether something was looked at and nothing was wrong."""
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that are not as they have to be."""
        return tuple(finding for finding in self.findings if not finding.passed)

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        head = f"{self.name}: {verdict}, {len(self.findings)} findings, {self.seconds:.1f} s"
        return "\n".join([head, *(f"    {finding}" for finding in self.wrong)])


def at(document: Any, path: str) -> Any:
    """The value at a dotted path (``response.output.0.type``), :data:`MISSING` where there is none."""
    value = document
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif _is_list(value) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def lost(source: Any, echoed: Any, path: str = "") -> str:
    """The first value of ``source`` that ``echoed`` does not have, as text; empty if it has them all.

    Fields that were added to objects are no loss, and neither is a field that was null and is missing.
    """
    if isinstance(source, Mapping) and isinstance(echoed, Mapping):
        for key, value in source.items():
            where = f"{path}.{key}" if path else str(key)
            if key not in echoed:
                if value is None:
                    continue
                return f"{where} is missing, it was {shown(value)}"
            if found := lost(value, echoed[key], where):
                return found
        return ""
    if _is_list(source) and _is_list(echoed):
        if len(source) != len(echoed):
            return f"{path} has {len(echoed)} entries, it had {len(source)}"
        for index, (before, after) in enumerate(zip(source, echoed, strict=True)):
            if found := lost(before, after, f"{path}.{index}"):
                return found
        return ""
    return "" if _same(source, echoed) else f"{path} is {shown(echoed)}, it was {shown(source)}"


def first_difference(expected: Any, got: Any, path: str = "") -> tuple[str, Any, Any]:
    """Where two values differ first, and the two parts that differ there."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in [*expected, *(key for key in got if key not in expected)]:
            one, other = expected.get(key, MISSING), got.get(key, MISSING)
            if not _same(one, other):
                return first_difference(one, other, f"{path}.{key}" if path else str(key))
    if _is_list(expected) and _is_list(got):
        for index in range(max(len(expected), len(got))):
            one = expected[index] if index < len(expected) else MISSING
            other = got[index] if index < len(got) else MISSING
            if not _same(one, other):
                return first_difference(one, other, f"{path}[{index}]")
    if isinstance(expected, str) and isinstance(got, str) and max(len(expected), len(got)) > _LONGEST:
        index = next(
            (place for place, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(got)),
        )
        return f"{path}[character {index}]", expected[index:], got[index:]
    return path, expected, got


def shown(value: Any) -> str:
    """A value as JSON on one line, shortened."""
    if value is MISSING:
        return repr(value)
    try:
        text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if _is_list(one) and _is_list(other):
        return len(one) == len(other) and all(
            _same(first, second) for first, second in zip(one, other, strict=True)
        )
    return one == other


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
