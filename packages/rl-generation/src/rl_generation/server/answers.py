"""Documents of the OpenAI chat protocol that carry exact tokens."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ..protocol import Completion
from .parsing import ParsedAnswer
from .refusals import AbortedError
from .schemas import ChatBody


def chat_document(
    model: str,
    prompt: Sequence[int],
    completion: Completion,
    parsed: ParsedAnswer,
    body: ChatBody,
    token_texts: Sequence[str],
) -> dict[str, Any]:
    """The answer to a chat request.

    Args:
        model: name under which the model is served.
        prompt: its tokens.
        completion: what was sampled.
        parsed: what that says.
        body: the request.
        token_texts: one per sampled token, for ``logprobs``; not looked at where the request wants none.

    Raises:
        AbortedError: the engine gave the request up.
    """
    if completion.stop_reason == "aborted":
        raise AbortedError(
            f"server: the engine aborted the request after {len(completion.token_ids)} tokens; send it again"
        )
    calls = parsed.tool_calls[:1] if body.parallel_tool_calls is False else parsed.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        # Two names are in use for it.
        message["reasoning_content"] = message["reasoning"] = parsed.reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    message |= token_fields(prompt, completion.token_ids, completion.logprobs, completion.weight_versions)
    finish: str = completion.stop_reason
    if calls and finish == "stop":
        finish = "tool_calls"
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": finish,
        "logprobs": {"content": _entries(completion, token_texts)} if body.logprobs else None,
    }
    if parsed.problems:
        choice["parse_problems"] = list(parsed.problems)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(completion.token_ids),
            "total_tokens": len(prompt) + len(completion.token_ids),
        },
    }


def token_fields(
    prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> dict[str, Any]:
    """What an answer's message carries of its tokens; the last three have one entry per sampled token."""
    return {
        "prompt_token_ids": list(prompt),
        "generation_token_ids": list(sampled),
        "generation_log_probs": list(logprobs),
        "weight_versions": list(versions),
    }


def tokenize_document(tokens: Sequence[int], max_context: int) -> dict[str, Any]:
    """The answer of ``/tokenize``."""
    return {"count": len(tokens), "max_model_len": max_context, "tokens": list(tokens)}


def models_document(model: str, max_context: int) -> dict[str, Any]:
    """The answer of ``/v1/models``."""
    entry = {"id": model, "object": "model", "owned_by": "rl-generation", "max_model_len": max_context}
    return {"object": "list", "data": [entry]}


def _entries(completion: Completion, texts: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
        for text, value in zip(texts, completion.logprobs, strict=True)
    ]
