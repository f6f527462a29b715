"""Scripted judges: what a judge model says about the answers that it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .chat_template import message_text
from .scripted_turn import ScriptedTurn

Judge = Callable[[Mapping[str, Any]], ScriptedTurn]
"""The judge's answer to a chat request."""

_PAIRS = (
    re.compile(
        r"<\|Start of Assistant A's Answer\|>\n(.*?)\n<\|End of Assistant A's Answer\|>.*"
        r"<\|Start of Assistant B's Answer\|>\n(.*?)\n<\|End of Assistant B's Answer\|>",
        re.DOTALL,
    ),
    re.compile(r"GOLD:\n((?:(?!GOLD:).)*?)\n\nCANDIDATE:\n((?:(?!GOLD:).)*)\Z", re.DOTALL),
)


def judge_by_equality(request: Mapping[str, Any]) -> ScriptedTurn:
    """``[[A=B]]`` if the two answers in the prompt are equal but for case, spaces and a box, else
    ``[[A!=B]]``.

    It reads the prompts of Gym's ``math_with_judge`` and ``equivalence_llm_judge``. A prompt with other marks
    is answered by ``[[A!=B]]``: what cannot be compared is not accepted.
    """
    text = message_text(request["messages"][-1].get("content"))
    for pattern in _PAIRS:
        if match := pattern.search(text):
            first, second = (_plain(answer) for answer in match.groups())
            return ScriptedTurn(content=f"Compared. {'[[A=B]]' if first == second else '[[A!=B]]'}")
    return ScriptedTurn(content="There is nothing to compare. [[A!=B]]")


def _plain(answer: str) -> str:
    text = answer.strip()
    if box := re.fullmatch(r"\\boxed\{(.*)\}", text, re.DOTALL):
        text = box[1].strip()
    return text.lower()
