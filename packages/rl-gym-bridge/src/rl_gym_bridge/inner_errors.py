"""Which status an inner server answered, in the text with which Gym passes its error on.

Gym's servers answer 500 when a server that they called did not succeed, and quote that one's content, as
Python writes bytes, in a JSON string: ``"Hit an exception in NAME calling an inner server: b'CONTENT'"``.
CONTENT may be such a string again. The status itself is lost; content that says it is read here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_QUOTES = " calling an inner server: "
#: How many servers may stand behind each other, and how long a quotation may be that is looked at.
_DEEPEST = 8
_LONGEST = 2**18


def inner_status(body: bytes) -> int | None:
    """HTTP status (400–599) that the innermost quoted server answered; ``None`` if none is quoted or told."""
    content = body
    for depth in range(_DEEPEST):
        document = _json(content)
        quoted = _quoted(document)
        if quoted is None:
            return _told(document) if depth else None
        content = quoted
    return None


def _json(content: bytes) -> Any:
    if len(content) > _LONGEST:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _quoted(document: Any) -> bytes | None:
    if not isinstance(document, str):
        return None
    _, marker, literal = document.partition(_QUOTES)
    if not marker or not literal.startswith(("b'", 'b"')):
        return None
    try:
        # Reads a literal, and runs nothing.
        content = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return content if isinstance(content, bytes) else None


def _told(document: Any) -> int | None:
    """What an engine's error says (``code``), or what only a refused request looks like."""
    if not isinstance(document, Mapping):
        return None
    error = document.get("error")
    code = error.get("code") if isinstance(error, Mapping) else document.get("code")
    if isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599:
        return code
    refusals = document.get("detail")
    # The list of fields that FastAPI found wanting, with which it answers 422 and nothing else.
    if isinstance(refusals, list) and refusals and all(_is_refusal(entry) for entry in refusals):
        return 422
    return None


def _is_refusal(entry: Any) -> bool:
    return isinstance(entry, Mapping) and {"loc", "msg", "type"} <= entry.keys()
