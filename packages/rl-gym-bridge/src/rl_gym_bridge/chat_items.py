"""Conversations written in chat style, as the items that Gym's Responses requests are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import DatasetError


def to_response_items(content: Any, *, row_id: str) -> Any:
    """``input`` with chat-style tool traffic turned into items; everything else stays as it is, in its place.

    An assistant message with ``tool_calls`` becomes the message, if it says anything, and one
    ``function_call`` per call; an empty or absent list of calls is left out. A ``tool`` message becomes a
    ``function_call_output``.

    Args:
        content: the row's ``responses_create_params.input``; not changed.
        row_id: for the error.

    Raises:
        DatasetError: a tool call or tool message that lacks what the item needs.
    """
    if not isinstance(content, list):
        return content
    items: list[Any] = []
    for index, item in enumerate(content):
        where = f"responses_create_params.input[{index}]"
        if not isinstance(item, Mapping) or item.get("type", "message") != "message":
            items.append(item)
        elif item.get("role") == "tool":
            items.append(_output(item, where, row_id))
        elif "tool_calls" in item:
            items += _message_and_calls(item, where, row_id)
        else:
            items.append(item)
    return items


def _message_and_calls(item: Mapping[str, Any], where: str, row_id: str) -> list[Mapping[str, Any]]:
    calls = item["tool_calls"] or []
    if not isinstance(calls, list):
        raise _fault(row_id, f"{where}.tool_calls", f"is a {type(calls).__name__}, not a list")
    message = {key: value for key, value in item.items() if key != "tool_calls"}
    items: list[Mapping[str, Any]] = [message] if message.get("content") or not calls else []
    for number, call in enumerate(calls):
        items.append(_call(call, f"{where}.tool_calls[{number}]", row_id))
    return items


def _call(call: Any, where: str, row_id: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _fault(row_id, where, 'is no {"id": …, "function": {"name": …, "arguments": …}}')
    fields = {"call_id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise _fault(row_id, where, f"has no text for {name}")
    return {"type": "function_call", **fields}


def _output(item: Mapping[str, Any], where: str, row_id: str) -> dict[str, Any]:
    call_id, content = item.get("tool_call_id"), item.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        known = [text for text in texts if isinstance(text, str)]
        content = "".join(known) if len(known) == len(texts) else None
    if not isinstance(call_id, str) or not isinstance(content, str):
        raise _fault(row_id, where, "is a tool message without tool_call_id or without text")
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def _fault(row_id: str, where: str, problem: str) -> DatasetError:
    return DatasetError(
        f"row {row_id!r}: it {problem}",
        field=where,
        remedy="write tool traffic as function_call and function_call_output items, or in full chat style",
    )
