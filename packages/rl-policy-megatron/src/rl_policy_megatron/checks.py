"""Checks of settings by their own declarations: the type of a field says what it may hold."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from .errors import SettingsError

_Kind = TypeVar("_Kind")
_SHOWN_CHARACTERS = 120
_NAMES = {
    int: "an integer",
    float: "a finite number",
    bool: "True or False",
    str: "a string",
    dict: "a mapping",
}


@dataclass(frozen=True, slots=True)
class Within:
    """Numbers from ``low`` to ``high``; NaN and infinity are in no range.

    Attributes:
        low: the least of them, or with ``above`` what they must exceed.
        high: what they must stay below.
        above: whether ``low`` itself is left out.
    """

    low: float
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether the number is one of them."""
        over = value > self.low if self.above else value >= self.low
        return over and value < self.high

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"in {'(' if self.above else '['}{self.low}, {self.high})"
        return f"{'>' if self.above else '>='} {self.low}"


Count = Annotated[int, Within(0)]
Positive = Annotated[int, Within(1)]
Rate = Annotated[float, Within(0)]
# Far beyond what anybody trains with, far below where AdamW leaves the numbers that a weight can hold.
LearningRate = Annotated[float, Within(0, 1e3)]
AboveZero = Annotated[float, Within(0, above=True)]
Beta = Annotated[float, Within(0, 1)]
Seed = Annotated[int, Within(0, 2**63)]


def check_fields(settings: Any) -> None:
    """Refuse a dataclass's values that its annotations do not allow.

    Integers, numbers, flags, strings, ``Literal``, ``| None``, tuples, classes and :class:`Within` are
    understood. An integer passes for a number; a flag passes for neither.

    Raises:
        SettingsError: names the field, what it must be, and the value.
    """
    hints = _hints(type(settings))
    for item in fields(settings):
        check(f"{type(settings).__name__}.{item.name}", getattr(settings, item.name), hints[item.name])


def check(name: str, value: Any, wanted: Any) -> None:
    """Refuse a value that is not what ``wanted``, an annotation, says.

    Raises:
        SettingsError: names both.
    """
    if not _fits(value, wanted):
        shown = repr(value)
        if len(shown) > _SHOWN_CHARACTERS:
            shown = f"a {type(value).__name__} ({shown[:_SHOWN_CHARACTERS]}…)"
        raise SettingsError(f"{name} must be {_told(wanted)}, got {shown}")


def checked_path(name: str, value: Any) -> Path:
    """A path that a caller gave.

    Raises:
        SettingsError: it is no path, empty, or holds a NUL character; names ``name``.
    """
    path = str(value) if isinstance(value, (str, Path)) else None
    if path is None or not path or "\0" in path:
        raise SettingsError(f"{name} must be the path of a directory, got {value!r}")
    return Path(path)


def given(value: Any, kind: type[_Kind], name: str) -> _Kind:
    """The settings that a caller gave, those of defaults in place of None.

    Raises:
        SettingsError: they are something else.
    """
    if value is None:
        return kind()
    check(name, value, kind)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _fits(value: Any, wanted: Any) -> bool:
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        return _fits(value, parts[0]) and all(limit.holds(value) for limit in parts[1:])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    kind = origin or wanted
    if kind in (int, float):
        numbers = int if kind is int else (int, float)
        if not isinstance(value, numbers) or isinstance(value, bool):
            return False
        # Integers are finite, and may be beyond what a float can hold.
        return isinstance(value, int) or math.isfinite(value)
    return isinstance(value, kind)


def _told(wanted: Any) -> str:
    return " or ".join(dict.fromkeys(_options(wanted)))


def _options(wanted: Any) -> Iterator[str]:
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        yield f"{_told(parts[0])} {' and '.join(str(limit) for limit in parts[1:])}"
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _options(part)
    elif origin is Literal:
        yield from map(repr, parts)
    elif origin is tuple and parts[-1] is Ellipsis:
        yield f"a tuple, each of it {_told(parts[0])}"
    elif origin is tuple:
        yield f"a tuple of {len(parts)}, each of it {_told(parts[0])}"
    elif wanted is type(None):
        yield "None"
    else:
        kind = origin or wanted
        yield _NAMES.get(kind, kind.__name__)
