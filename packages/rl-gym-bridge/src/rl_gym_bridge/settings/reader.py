"""Reads a settings mapping into a frozen dataclass, and refuses what does not fit its fields' types."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..failures import GymConfigError, GymError
from ..suggestions import did_you_mean

Settings = TypeVar("Settings")


def plain(value: Any) -> Any:
    """A deep copy made of dictionaries and lists, whatever mappings and sequences ``value`` is made of."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    return copy.deepcopy(value)


def read_settings(cls: type[Settings], values: Any, where: str) -> Settings:
    """An instance of the dataclass ``cls`` from a mapping of its fields.

    Args:
        cls: its fields may be scalars, literals, mappings, dataclasses, tuples of these, and optional.
        values: field name → value; what is not named keeps its default.
        where: dotted place of ``values``, for messages.

    Raises:
        GymConfigError: no mapping, an unknown or missing field, or a value of a wrong type or range.
    """
    if isinstance(values, cls):
        return values
    mapping = as_mapping(values, where)
    hints = _hints(cls)
    for name in mapping:
        if name not in hints:
            raise GymConfigError(
                f"there is no setting {name!r}{suggestion(name, hints)}",
                component=where,
                remedy=f"use {', '.join(hints)}",
            )
    read = {name: _read(hints[name], value, f"{where}.{name}") for name, value in mapping.items()}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in read:
            raise GymConfigError(f"{field.name} is missing", component=where, remedy=f"add {field.name}")
    try:
        return cls(**read)
    except GymError as error:
        place = f"{where}.{error.component}" if error.component else where
        raise GymConfigError(error.problem, component=place, remedy=error.remedy) from error
    except ValueError as error:
        raise GymConfigError(str(error), component=where, remedy="correct the settings there") from error


def read_fields(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same for some fields of ``cls`` only: field name → value of the field's type.

    Raises:
        GymConfigError: as :func:`read_settings`.
    """
    hints = _hints(cls)
    return {name: _read(hints[name], value, f"{where}.{name}") for name, value in values.items()}


def as_mapping(value: Any, where: str) -> Mapping[str, Any]:
    """``value``, if it is a mapping with strings as keys.

    Raises:
        GymConfigError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise _wrong(value, "a mapping", where)
    for key in value:
        if not isinstance(key, str):
            raise GymConfigError(
                f"the key {key!r} is no string", component=where, remedy="write it in quotes"
            )
    return value


def suggestion(name: str, known: Mapping[str, Any] | Sequence[str], cutoff: float = 0.6) -> str:
    """``" (did you mean 'x'?)"`` for the closest known name, or nothing."""
    hint = did_you_mean(name, known, cutoff=cutoff)
    return f" ({hint})" if hint else ""


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _read(hint, value, where)
    if origin is Literal:
        if value not in arguments:
            raise GymConfigError(
                f"{value!r} is not one of {', '.join(arguments)}{suggestion(str(value), arguments)}",
                component=where,
                remedy=f"choose {' or '.join(map(repr, arguments))}",
            )
        return value
    if origin is tuple:
        return _read_tuple(arguments, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_settings(hint, value, where)
    if origin is not None and issubclass(origin, Mapping):
        return plain(as_mapping(value, where))
    return _scalar(hint, value, where)


def _read_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    element = arguments[0]
    if isinstance(value, Mapping) and dataclasses.is_dataclass(element):
        # `low: {share: 0.2}` says the same as `[{name: low, share: 0.2}]`.
        value = [{"name": name, **as_mapping(item or {}, f"{where}.{name}")} for name, item in value.items()]
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise _wrong(value, "a list", where)
    if arguments[-1] is not Ellipsis and len(value) != len(arguments):
        raise GymConfigError(
            f"{list(value)!r} has {len(value)} entries, not {len(arguments)}",
            component=where,
            remedy=f"give {len(arguments)}",
        )
    return tuple(_read(element, item, f"{where}[{index}]") for index, item in enumerate(value))


_SCALARS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def _scalar(kind: type, value: Any, where: str) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    # True is an int to Python, and never what somebody means who gives it where a number belongs.
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(value, _SCALARS[kind], where)
    return float(value) if kind is float else value


def _wrong(value: Any, wanted: str, where: str) -> GymConfigError:
    return GymConfigError(
        f"{value!r} is a {type(value).__name__}, not {wanted}",
        component=where,
        remedy=f"give {wanted}{', without quotes' if isinstance(value, str) and wanted != 'a list' else ''}",
    )
