"""OpenAI chat completions of the scripted model: one request in, one answer out, nothing kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .byte_tokenizer import ByteTokenizer
from .chat_template import SampledAnswer, TemplateError, logprob, prompt_tokens, sample
from .scripted_turn import ScriptedTurn

TokenStyle = Literal["message", "logprobs"]
"""Where token ids are: in the message, as RL's own servers have them, or in ``logprobs`` alone, as vLLM
does."""


class RequestRefused(ValueError):
    """A request that an engine answers with an error.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    Attributes:
        document: the JSON object to send.
        prompt_token_ids: the prompt.
        generation_token_ids: the answer.
        generation_log_probs: log-probability of each of its tokens.
        finish_reason: ``stop``, ``tool_calls`` or ``length``, or what the script says.
    """

    document: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]
    generation_log_probs: tuple[float, ...]
    finish_reason: str


def complete(
    body: Mapping[str, Any], turn: ScriptedTurn, *, number: int, context_length: int, style: TokenStyle
) -> Completion:
    """The answer to a chat request.

    Args:
        body: the request.
        turn: what the model says.
        number: makes the answer's id unique.
        context_length: tokens of prompt and answer together at most.
        style: where the token ids are put, if the request wants log-probabilities.

    Raises:
        RequestRefused: it does not fit into the context, or asks for what the server has not.
    """
    if body.get("stream") or (body.get("n") or 1) != 1:
        raise RequestRefused("the scripted model answers once and whole: no stream, n of 1")
    prompt = request_prompt(body)
    sampled = sample(turn, _room(body, len(prompt), context_length))
    finish = turn.finish_reason or ("tool_calls" if sampled.tool_calls else "stop")
    if sampled.cut:
        finish = "length"
    log_probs = tuple(logprob(len(prompt) + index, token) for index, token in enumerate(sampled.token_ids))
    message = _message(sampled, turn_index(body.get("messages", ())))
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": finish,
        "stop_reason": None,
        "logprobs": None,
    }
    if body.get("logprobs"):
        choice["logprobs"] = {"content": _entries(sampled.token_ids, log_probs, body)}
        if style == "message":
            message["prompt_token_ids"] = prompt
            message["generation_token_ids"] = list(sampled.token_ids)
            message["generation_log_probs"] = list(log_probs)
    document = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled.token_ids),
            "total_tokens": len(prompt) + len(sampled.token_ids),
        },
    }
    return Completion(document, tuple(prompt), sampled.token_ids, log_probs, finish)


def request_prompt(body: Mapping[str, Any]) -> list[int]:
    """The prompt's tokens.

    Raises:
        RequestRefused: messages that the chat template cannot render.
    """
    try:
        return prompt_tokens(body.get("messages") or (), body.get("tools"))
    except (TemplateError, KeyError, TypeError) as error:
        raise RequestRefused(f"the messages cannot be rendered: {error}") from error


def turn_index(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many of the earlier answers this model gave: those that carry their token ids."""
    return sum(message.get("prompt_token_ids") is not None for message in messages)


def _room(body: Mapping[str, Any], prompt: int, context_length: int) -> int:
    """Tokens that may be sampled."""
    limit = body.get("max_completion_tokens")
    if limit is None:
        limit = body.get("max_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise RequestRefused(f"the number of tokens to sample must be at least 1, got {limit!r}")
    asked = f"{prompt + (limit or 0)} tokens ({prompt} in the messages, {limit or 0} in the completion)"
    if prompt + (limit or 1) > context_length:
        # Gym tells a full context from other faults by these words.
        raise RequestRefused(
            f"This model's maximum context length is {context_length} tokens. However, you requested {asked}."
            f" Please reduce the length of the messages or completion."
        )
    return limit or context_length - prompt


def _message(sampled: SampledAnswer, turn: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": sampled.content}
    if sampled.reasoning_content:
        message["reasoning_content"] = sampled.reasoning_content
    if sampled.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call-{turn}-{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for index, call in enumerate(sampled.tool_calls)
        ]
    return message


def _entries(
    token_ids: Sequence[int], log_probs: Sequence[float], body: Mapping[str, Any]
) -> list[dict[str, Any]]:
    tokenizer = ByteTokenizer()
    as_ids = body.get("return_tokens_as_token_ids")
    return [
        {
            "token": f"token_id:{token}" if as_ids else tokenizer.decode([token], skip_control_tokens=False),
            "logprob": value,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, value in zip(token_ids, log_probs, strict=True)
    ]
