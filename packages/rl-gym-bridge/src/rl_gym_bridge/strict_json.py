"""JSON as the standard has it: no NaN, no repeated key, no half character."""

from __future__ import annotations

import json
import math
from typing import Any


class JsonFault(ValueError):
    """A text that is not JSON, and why."""


def loads_strict(text: str) -> Any:
    """Parse ``text``; unlike ``json.loads`` every fault of the text is one kind of error.

    Raises:
        JsonFault: broken syntax, ``NaN`` or ``Infinity``, a repeated key, an escape that is half of a
            character, nesting or a number beyond the parser's limits.
    """
    try:
        parsed = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
    except JsonFault:
        raise
    except json.JSONDecodeError as error:
        raise JsonFault(f"{error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise JsonFault("nested too deeply") from error
    except ValueError as error:
        raise JsonFault(str(error)) from error
    if "\\u" in text:
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise JsonFault("a \\u escape that is half of a character (a lone surrogate)") from error
    return parsed


def _refuse_constant(name: str) -> Any:
    raise JsonFault(f"{name} is not a JSON number")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise JsonFault(f"{literal} is too large for a number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise JsonFault(f"the key {repeated!r} appears twice in one object")
    return result
