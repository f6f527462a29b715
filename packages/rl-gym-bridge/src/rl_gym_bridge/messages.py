"""From OpenAI Responses input to chat messages with plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import DatasetError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("input_text", "output_text", "text")


def check_input(params: Mapping[str, Any], *, field: str) -> None:
    """Check the shape of ``params["input"]``; items of kinds other than messages are let through.

    Raises:
        DatasetError: missing, empty, neither a string nor a list, or a message without role or content.
    """
    where = f"{field}.input"
    remedy = 'write a string or a list of {"role": …, "content": …}'
    if "input" not in params:
        raise DatasetError("it is missing", field=where, remedy=remedy)
    content = params["input"]
    if isinstance(content, str):
        if not content:
            raise DatasetError("it is an empty string", field=where, remedy=remedy)
        return
    if not isinstance(content, list):
        raise DatasetError(f"it is a {type(content).__name__}", field=where, remedy=remedy)
    if not content:
        raise DatasetError("it is an empty list", field=where, remedy=remedy)
    for index, item in enumerate(content):
        _check_item(item, f"{where}[{index}]")


def to_chat_messages(params: Mapping[str, Any], *, row_id: str) -> tuple[dict[str, str], ...]:
    """Messages of ``{"role", "content"}`` with text; ``developer`` becomes ``system``.

    Raises:
        DatasetError: an item that is not a message, or content that is not text.
    """
    messages: list[dict[str, str]] = []
    instructions = params.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    content = params["input"]
    if isinstance(content, str):
        messages.append({"role": "user", "content": content})
        return tuple(messages)
    for index, item in enumerate(content):
        role = "system" if item.get("role") == "developer" else item.get("role")
        text = _text_of(item.get("content"))
        if role is None or text is None:
            kind = item.get("type", "message")
            raise DatasetError(
                f"row {row_id!r} holds an item of type {kind!r} that is not a text message",
                field=f"responses_create_params.input[{index}]",
                remedy="in-process environments take text messages only; run such rows through Gym",
            )
        messages.append({"role": role, "content": text})
    return tuple(messages)


def _check_item(item: Any, where: str) -> None:
    if not isinstance(item, Mapping):
        raise DatasetError(
            f"it is a {type(item).__name__}, not an object",
            field=where,
            remedy='write a message as {"role": …, "content": …}',
        )
    if item.get("type", "message") != "message":
        return
    role = item.get("role")
    if role not in _ROLES:
        raise DatasetError(f"it is {role!r}", field=f"{where}.role", remedy=f"use one of {', '.join(_ROLES)}")
    if role == "assistant" and item.get("content") is None and item.get("tool_calls"):
        return
    if not isinstance(item.get("content"), (str, list)):
        raise DatasetError(
            f"it is a {type(item.get('content')).__name__}",
            field=f"{where}.content",
            remedy="write a string or a list of content parts",
        )


def _text_of(content: Any) -> str | None:
    """The text of a message's content, ``None`` if any of it is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
            return None
        text = part.get("text")
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)
