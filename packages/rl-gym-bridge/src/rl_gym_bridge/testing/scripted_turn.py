"""What the scripted model server says in one call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


class ScriptError(ValueError):
    """A script that cannot be read, and why."""


@dataclass(frozen=True, slots=True)
class ScriptedToolCall:
    """A tool call of an answer.

    Attributes:
        name: the tool.
        arguments: by name, or the text that the model writes in their place (for broken JSON).
    """

    name: str
    arguments: Mapping[str, Any] | str

    @property
    def arguments_text(self) -> str:
        """The arguments as the model writes them."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(dict(self.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One answer of the model, or one of its faults.

    Attributes:
        content: the visible text.
        reasoning_content: the thinking.
        tool_calls: made after the text.
        finish_reason: instead of the one that follows from the answer.
        status: HTTP status to answer with; anything but 200 is a fault.
        body: raw text to send instead of the answer.
        delay_s: seconds to wait before anything is sent.
        drop_connection: close the connection instead of answering.
        faulty_calls: so many calls of this turn get the fault, later ones the answer; ``None`` is all of
            them.
    """

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ScriptedToolCall, ...] = ()
    finish_reason: str | None = None
    status: int = 200
    body: str | None = None
    delay_s: float = 0.0
    drop_connection: bool = False
    faulty_calls: int | None = None

    @property
    def is_fault(self) -> bool:
        """Whether it is something else than an answer."""
        return self.status != 200 or self.body is not None or self.drop_connection

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ScriptedTurn:
        """A turn from its JSON object, in which every field may be missing.

        Raises:
            ScriptError: an unknown field, a value of the wrong type, or nothing to say.
        """
        if not isinstance(mapping, Mapping):
            raise ScriptError(f"a turn is a JSON object, not {type(mapping).__name__}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(mapping) - known)
        if unknown:
            raise ScriptError(
                f"a turn has no field {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}"
            )
        values = dict(mapping)
        for name, allowed in _TYPES.items():
            value = values.get(name)
            wrong = isinstance(value, bool) and bool not in allowed
            if name in values and (wrong or not isinstance(value, allowed)):
                raise ScriptError(f"{name} of a turn is {value!r}")
        values["tool_calls"] = tuple(_tool_call(call) for call in _sequence(values.get("tool_calls", ())))
        turn = cls(**values)
        if turn.content is None and not turn.reasoning_content and not turn.tool_calls and not turn.is_fault:
            raise ScriptError("a turn says nothing: give it content, tool_calls, or a fault")
        return turn


_TYPES: dict[str, tuple[type, ...]] = {
    "content": (str, type(None)),
    "reasoning_content": (str, type(None)),
    "finish_reason": (str, type(None)),
    "status": (int,),
    "body": (str, type(None)),
    "delay_s": (int, float),
    "drop_connection": (bool,),
    "faulty_calls": (int, type(None)),
}


def turns_from(value: Any) -> tuple[ScriptedTurn, ...]:
    """Turns from a JSON list of objects; a text stands for a turn with that content.

    Raises:
        ScriptError: no list, an empty one, or a faulty turn.
    """
    turns = tuple(
        ScriptedTurn(content=item) if isinstance(item, str) else ScriptedTurn.from_mapping(item)
        for item in _sequence(value)
    )
    if not turns:
        raise ScriptError("a script needs at least one turn")
    return turns


def _sequence(value: Any) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ScriptError(f"expected a list, got {type(value).__name__}")
    return value


def _tool_call(value: Any) -> ScriptedToolCall:
    if isinstance(value, ScriptedToolCall):
        return value
    if (
        not isinstance(value, Mapping)
        or set(value) != {"name", "arguments"}
        or not isinstance(value["name"], str)
        or not isinstance(value["arguments"], (str, Mapping))
    ):
        raise ScriptError(f'a tool call is {{"name": text, "arguments": object or text}}, not {value!r}')
    return ScriptedToolCall(value["name"], value["arguments"])
