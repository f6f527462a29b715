"""What sampled text says: thinking, visible text, tool calls. A protocol, and two parsers of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A well-formed tool call.

    Attributes:
        name: of the tool.
        arguments: a JSON object as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer in parts.

    Attributes:
        content: visible text, ``None`` where there is none.
        reasoning: thinking, ``None`` where there is none.
        tool_calls: the well-formed ones.
        problems: one sentence per part that could not be read and was left in the text.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[CalledTool, ...] = ()
    problems: tuple[str, ...] = ()


class AnswerParser(Protocol):
    """From text to parts. It never raises, whatever a model writes."""

    def parse(self, text: str, *, with_tools: bool) -> ParsedAnswer:
        """The parts of an answer.

        Args:
            text: without the token that ended it.
            with_tools: whether the model may call tools; if not, what looks like a call is text.
        """
        ...


class PlainParser:
    """All of an answer is visible text."""

    def parse(self, text: str, *, with_tools: bool) -> ParsedAnswer:
        """See :class:`AnswerParser`."""
        return ParsedAnswer(text or None)


class TaggedParser:
    """``<think>`` … ``</think>`` and Hermes' ``<tool_call>`` {"name", "arguments"} ``</tool_call>``.

    A call that cannot be read stays in the text, tags and all, and is named in ``problems``.

    Args:
        tool_calls: whether calls are read.
        reasoning: whether thinking is split off. A template may open it in the prompt, so everything before
            ``</think>`` is thinking with or without an opening tag.
    """

    def __init__(self, *, tool_calls: bool = True, reasoning: bool = True) -> None:
        self._tool_calls = tool_calls
        self._reasoning = reasoning

    def parse(self, text: str, *, with_tools: bool) -> ParsedAnswer:
        """See :class:`AnswerParser`."""
        reasoning, visible = _split_thinking(text) if self._reasoning else (None, text)
        calls: list[CalledTool] = []
        problems: list[str] = []
        if self._tool_calls and with_tools:
            visible = _read_calls(visible, calls, problems)
        return ParsedAnswer(visible or None, reasoning or None, tuple(calls), tuple(problems))


# A call's body holds no second opening tag, so that an unclosed call does not swallow the next one.
_CALL = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.DOTALL)


def _split_thinking(text: str) -> tuple[str | None, str]:
    thought, closed, rest = text.partition("</think>")
    if closed:
        return thought.replace("<think>", "", 1).strip("\n"), rest.lstrip("\n")
    before, opened, thought = text.partition("<think>")
    # Cut off while it was thinking.
    return (thought.strip("\n"), before) if opened else (None, text)


def _read_calls(text: str, calls: list[CalledTool], problems: list[str]) -> str:
    kept: list[str] = []
    end = 0
    for match in _CALL.finditer(text):
        kept.append(text[end : match.start()])
        end = match.end()
        call = _read_call(match[1])
        if isinstance(call, CalledTool):
            calls.append(call)
        else:
            problems.append(call)
            kept.append(match[0])
    kept.append(text[end:])
    rest = "".join(kept)
    if _CALL.sub("", rest).count("<tool_call>"):
        problems.append("a tool call has no </tool_call>")
    return rest.strip() if calls else rest


def _read_call(body: str) -> CalledTool | str:
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"a tool call is not valid JSON ({error})"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return 'a tool call is no object with a "name"'
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return 'a tool call\'s "arguments" are no object'
    return CalledTool(call["name"], json.dumps(arguments, ensure_ascii=False))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
