"""What the policy said in one model call: its text, and whether tags stand where they should not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import GymAnswerError

#: Text that shows a tool call which was written instead of made.
INVALID_TOOL_CALL_PATTERNS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
#: Opening and closing tag of thinking.
THINKING_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class CallText:
    """The words of one model call.

    Attributes:
        answer: text of its messages.
        reasoning: text of its thinking, one entry per piece.
        tool_calls: how many calls it made the structured way.
    """

    answer: str
    reasoning: tuple[str, ...]
    tool_calls: int

    def has_invalid_tool_call(self, patterns: Sequence[str]) -> bool:
        """Whether a tool call was written as text: a pattern stands in the answer or the thinking."""
        return any(pattern in text for text in (self.answer, *self.reasoning) for pattern in patterns)

    def has_malformed_thinking(self, tags: tuple[str, str]) -> bool:
        """Whether a thinking tag stands in the answer at all, or those in the thinking do not pair up.

        Gym takes well-formed thinking out of the answer; what is left there is a fault.
        """
        return any(tag in self.answer for tag in tags) or not all(
            _tags_pair_up(text, tags) for text in self.reasoning
        )


def read_text(items: Sequence[Mapping[str, Any]]) -> CallText:
    """The text of a call's items; absent and empty content is no text.

    Raises:
        GymAnswerError: content of a shape that Gym does not produce.
    """
    answer: list[str] = []
    reasoning: list[str] = []
    tool_calls = 0
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            tool_calls += 1
        elif kind == "reasoning":
            reasoning += _texts(item.get("summary"), "summary") + _texts(item.get("content"), "content")
        else:
            answer += _texts(item.get("content"), "content")
    return CallText("".join(answer), tuple(reasoning), tool_calls)


def split_raw_text(text: str, tags: tuple[str, str] = THINKING_TAGS) -> CallText:
    """An answer as it was sampled, taken apart as Gym does it: thinking is what matching tags enclose.

    Tool calls in it are left where they are.
    """
    pattern = re.compile(f"{re.escape(tags[0])}(.*?){re.escape(tags[1])}", re.DOTALL)
    return CallText(pattern.sub("", text), tuple(pattern.findall(text)), 0)


def _texts(content: Any, name: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise GymAnswerError(f"an item's {name} is a {type(content).__name__}, not text or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping):
            raise GymAnswerError(f"a part of an item's {name} is a {type(part).__name__}, not an object")
        text = part.get("text")
        if text is None:
            text = part.get("refusal")
        if text is not None and not isinstance(text, str):
            raise GymAnswerError(f"the text of a part of an item's {name} is a {type(text).__name__}")
        if text:
            texts.append(text)
    return texts


def _tags_pair_up(text: str, tags: tuple[str, str]) -> bool:
    """Whether opening and closing tags alternate, beginning with an opening one, none left open."""
    opening, closing = tags
    rest = text
    while True:
        before, opened, rest = rest.partition(opening)
        if closing in before:
            return False
        if not opened:
            return True
        inside, closed, rest = rest.partition(closing)
        if not closed or opening in inside:
            return False
