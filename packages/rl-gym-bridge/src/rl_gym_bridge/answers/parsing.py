"""Gym's answers as values: as strict as :mod:`rl_gym_bridge.strict_json`, and fast on lists of numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ..failures import GymAnswerError
from ..strict_json import JsonFault, loads_strict

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
#: Characters of an unusable answer that its error shows.
SHOWN = 300


class _Doubt(ValueError):
    """Something that only the strict parser can judge."""


def parse_answer(body: bytes) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        GymAnswerError: it is not UTF-8, not JSON as the standard has it, or not an object.
    """
    try:
        value = _loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise GymAnswerError(f"the answer is not UTF-8 ({error.reason}): {beginning(body)}") from error
    except JsonFault as error:
        raise GymAnswerError(f"the answer is not JSON ({error}): {beginning(body)}") from error
    if not isinstance(value, dict):
        raise GymAnswerError(f"the answer is no JSON object: {beginning(body)}")
    return value


def beginning(body: bytes, length: int = SHOWN) -> str:
    """The first ``length`` characters of a content as text, whatever its bytes; ``…`` where it goes on."""
    text = body[: 4 * length].decode("utf-8", errors="replace")
    whole = len(body) <= 4 * length and len(text) <= length
    return text if whole else f"{text[:length]}…"


def _loads(text: str) -> Any:
    """Parse without the strict parser's call per number; that one has the word wherever there is doubt."""
    try:
        if _HALF_CHARACTER.search(text):
            raise _Doubt
        value = json.loads(text, object_pairs_hook=_unique_and_finite)
        _check_finite(value)
    except (ValueError, RecursionError):
        return loads_strict(text)
    return value


def _unique_and_finite(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _Doubt
    for value in result.values():
        _check_finite(value)
    return result


def _check_finite(value: Any) -> None:
    """Doubt a number that is none or infinite. Objects were looked at when they were made."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _Doubt
    elif isinstance(value, list) and value:
        try:
            # One call for a list of numbers: an infinite one makes the sum infinite or no number.
            if math.isfinite(sum(value)):
                return
        except (TypeError, OverflowError):
            pass
        for item in value:
            _check_finite(item)
