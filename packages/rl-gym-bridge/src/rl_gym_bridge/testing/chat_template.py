"""The scripted model's chat template: messages and tools in, token ids out, and an answer back again.

ChatML over bytes. Everything that a request shows the model is in the tokens: a changed tool schema, tool
answer or earlier thought changes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .byte_tokenizer import ByteTokenizer
from .scripted_turn import ScriptedToolCall, ScriptedTurn

_TOKENIZER = ByteTokenizer()
_ROLES = ("system", "developer", "user", "tool", "assistant")


class TemplateError(ValueError):
    """Messages that the template cannot render."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """An answer as tokens and as what they say.

    Attributes:
        token_ids: as sampled, with the end token unless it was cut.
        content: visible text, ``None`` where there is none.
        reasoning_content: thinking, ``None`` where there is none.
        tool_calls: those that were written to their end.
        cut: whether it ended for lack of room.
    """

    token_ids: tuple[int, ...]
    content: str | None
    reasoning_content: str | None
    tool_calls: tuple[ScriptedToolCall, ...]
    cut: bool


def sample(turn: ScriptedTurn, room: int | None = None) -> SampledAnswer:
    """The tokens of a scripted answer, cut after ``room`` of them."""
    whole = answer_tokens(turn.content, turn.reasoning_content, turn.tool_calls)
    if room is None or len(whole) <= room:
        return SampledAnswer(
            tuple(whole), turn.content, turn.reasoning_content or None, turn.tool_calls, cut=False
        )
    kept = whole[:room]
    reasoning, content, calls = _read(kept)
    return SampledAnswer(tuple(kept), content or None, reasoning or None, calls, cut=True)


def answer_tokens(
    content: str | None, reasoning: str | None = None, tool_calls: Sequence[ScriptedToolCall] = ()
) -> list[int]:
    """Thinking, text and tool calls of an answer, and its end token."""
    token_ids: list[int] = []
    if reasoning:
        token_ids += [_TOKENIZER.think_open_id, *_TOKENIZER.encode(reasoning), _TOKENIZER.think_close_id]
    token_ids += _TOKENIZER.encode(content or "")
    for call in tool_calls:
        text = json.dumps([call.name, call.arguments_text], ensure_ascii=False)
        token_ids += [_TOKENIZER.tool_call_open_id, *_TOKENIZER.encode(text), _TOKENIZER.tool_call_close_id]
    return [*token_ids, _TOKENIZER.im_end_id]


def prompt_tokens(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """The prompt of a chat request.

    The last message that carries its token ids fixes everything up to its end, so that a prompt extends the
    tokens of the turns before it however the history is written.

    Args:
        messages: OpenAI chat messages; an assistant's may carry ``prompt_token_ids`` and
            ``generation_token_ids``.
        tools: OpenAI function tools.

    Raises:
        TemplateError: an unknown role, or content that is neither text nor parts of text.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.get("prompt_token_ids") is not None:
            seen = [*message["prompt_token_ids"], *message.get("generation_token_ids", ())]
            return next_prompt(seen, messages[index + 1 :])
    token_ids: list[int] = []
    if tools:
        offered = json.dumps([tool.get("function") for tool in tools], ensure_ascii=False, sort_keys=True)
        token_ids += _block(f"tools\n{offered}")
    return token_ids + _conversation(messages)


def next_prompt(seen: Sequence[int], new_messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """``seen``, which ends with an answer, new messages, and the header of the next answer."""
    closing = [] if seen and seen[-1] == _TOKENIZER.im_end_id else [_TOKENIZER.im_end_id]
    return [*seen, *closing, *_TOKENIZER.encode("\n"), *_conversation(new_messages)]


def logprob(position: int, token: int) -> float:
    """Log-probability of ``token`` at ``position`` of the sequence: below 0, above -4, exact even as
    float16."""
    return -(1 + (position * 31 + token * 577) % 2039) / 512


def message_text(content: Any) -> str:
    """The text of a message's content.

    Raises:
        TemplateError: it is neither text nor a list of text parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
    raise TemplateError("the content of a message is neither text nor a list of text parts")


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    token_ids: list[int] = []
    for message in messages:
        role = message.get("role")
        if role not in _ROLES:
            raise TemplateError(f"a message has the role {role!r}")
        if role == "assistant":
            token_ids += [_TOKENIZER.im_start_id, *_TOKENIZER.encode("assistant\n")]
            token_ids += _earlier_answer(message) + _TOKENIZER.encode("\n")
        else:
            token_ids += _block(f"{role}\n{message_text(message.get('content'))}")
    return [*token_ids, _TOKENIZER.im_start_id, *_TOKENIZER.encode("assistant\n")]


def _block(text: str) -> list[int]:
    return [_TOKENIZER.im_start_id, *_TOKENIZER.encode(text), _TOKENIZER.im_end_id, *_TOKENIZER.encode("\n")]


def _earlier_answer(message: Mapping[str, Any]) -> list[int]:
    calls = tuple(
        ScriptedToolCall(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return answer_tokens(message_text(message.get("content")), reasoning, calls)


def _read(token_ids: Sequence[int]) -> tuple[str, str, tuple[ScriptedToolCall, ...]]:
    """Thinking, text and finished tool calls of an answer that was cut."""
    parts: dict[str, list[int]] = {"reasoning": [], "content": [], "call": []}
    calls: list[ScriptedToolCall] = []
    into = "content"
    for token in token_ids:
        if token == _TOKENIZER.think_open_id:
            into = "reasoning"
        elif token == _TOKENIZER.tool_call_open_id:
            into = "call"
            parts["call"].clear()
        elif token == _TOKENIZER.tool_call_close_id:
            name, arguments = json.loads(_TOKENIZER.decode(parts["call"]))
            calls.append(ScriptedToolCall(name, arguments))
            into = "content"
        elif token == _TOKENIZER.think_close_id:
            into = "content"
        else:
            parts[into].append(token)
    # A character that was cut in its middle is no text yet.
    reasoning, content = (
        bytes(token for token in parts[name] if token < 256).decode("utf-8", "ignore")
        for name in ("reasoning", "content")
    )
    return reasoning, content, tuple(calls)
