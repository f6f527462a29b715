"""Tool calls in the text of an answer: ``<tool_call>`` newline JSON newline ``</tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .strict_json import JsonFault, loads_strict

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"
_CALL = re.compile(rf"{OPEN_TAG}((?:(?!{OPEN_TAG}).)*?){CLOSE_TAG}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call: the name of a tool and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedToolCall:
    """A call that cannot be read.

    Attributes:
        problem: what is wrong with it, in words for the policy.
    """

    problem: str


def parse_tool_calls(text: str) -> tuple[ToolCall | MalformedToolCall, ...]:
    """Every tool call of an answer, in order.

    Whatever stands in the thinking part is not a call. An opening tag is always a call, if only a
    malformed one; a stray closing tag is plain text. Never raises, whatever the text.
    """
    calls: list[ToolCall | MalformedToolCall] = []
    rest = visible_text(text)
    while True:
        _, opened, rest = rest.partition(OPEN_TAG)
        if not opened:
            return tuple(calls)
        body, closed, after = rest.partition(CLOSE_TAG)
        nested = body.find(OPEN_TAG)
        if not closed or nested >= 0:
            calls.append(MalformedToolCall(f"a tool call has no {CLOSE_TAG}"))
            if nested < 0:
                return tuple(calls)
            rest = rest[nested:]
            continue
        calls.append(_parse_body(body))
        rest = after


def visible_text(text: str) -> str:
    """What stands outside the thinking part: after the last ``</think>``, before an unclosed ``<think>``."""
    answer = text.rpartition(_THINK_CLOSE)[2]
    return answer.partition(_THINK_OPEN)[0]


def without_tool_calls(text: str) -> str:
    """``text`` without its well-formed calls: a tag that is left belongs to a call that was not made."""
    return _CALL.sub(lambda call: "" if isinstance(_parse_body(call[1]), ToolCall) else call[0], text)


def render_tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call, as :func:`parse_tool_calls` reads it and demonstrations should write it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
    return f"{OPEN_TAG}\n{call}\n{CLOSE_TAG}"


def _parse_body(body: str) -> ToolCall | MalformedToolCall:
    try:
        parsed = loads_strict(body.strip())
    except JsonFault as error:
        return MalformedToolCall(f"the tool call is not valid JSON ({error})")
    if not isinstance(parsed, dict):
        return MalformedToolCall('the tool call is not an object {"name": …, "arguments": {…}}')
    name = parsed.get("name")
    if not isinstance(name, str) or not name:
        return MalformedToolCall('the tool call has no "name" that is a non-empty string')
    arguments = parsed.get("arguments")
    if not isinstance(arguments, dict):
        return MalformedToolCall('the tool call has no "arguments" that are an object')
    surplus = sorted(set(parsed) - {"name", "arguments"})
    if surplus:
        return MalformedToolCall(f"the tool call has unknown keys: {', '.join(surplus)}")
    return ToolCall(name, arguments)
