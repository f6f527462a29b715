"""How Gym hands the items of an OpenAI Responses request to a chat model, written down a second time.

A check that took the prompt from Gym's own answer could not see a prompt that is wrong there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .chat_template import TemplateError, message_text
from .scripted_turn import ScriptedTurn

_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_SPEAKERS = ("system", "developer", "user")


def chat_messages(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat messages of ``responses_create_params``.

    Thinking, text and tool calls that follow each other become one message of the assistant.

    Raises:
        TemplateError: an item of a kind that Gym's model server does not know.
    """
    items = params.get("input") or []
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") in _SPEAKERS:
            messages.append({"role": item["role"], "content": message_text(item.get("content"))})
        elif kind == "function_call_output":
            messages.append(tool_message(item["call_id"], item["output"]))
        elif kind in ("message", "reasoning", "function_call"):
            _add_to_answer(messages, kind, item)
        else:
            raise TemplateError(f"an input item has the type {kind!r} and the role {item.get('role')!r}")
    return messages


def chat_tools(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools on offer, as a chat model gets them."""
    return [
        {
            "type": "function",
            "function": {key: value for key, value in tool.items() if key not in ("type", "strict")},
        }
        for tool in params.get("tools") or []
    ]


def tool_message(call_id: str, output: str) -> dict[str, Any]:
    """The answer of a tool."""
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def answer_message(turn: ScriptedTurn, index: int) -> dict[str, Any]:
    """A scripted answer, the ``index``-th of its rollout, as it comes back in the history."""
    return {
        "role": "assistant",
        "content": turn.content or "",
        "reasoning_content": turn.reasoning_content or "",
        "tool_calls": [
            {
                "id": f"call-{index}-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for number, call in enumerate(turn.tool_calls)
        ],
    }


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages reduced to what they say: without token ids, and without empty fields."""
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    reduced: dict[str, Any] = {"role": message.get("role"), "content": message_text(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        reduced["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        reduced["tool_calls"] = [
            [call.get("id"), call["function"]["name"], call["function"]["arguments"]]
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id") is not None:
        reduced["tool_call_id"] = message["tool_call_id"]
    return reduced


def _add_to_answer(messages: list[dict[str, Any]], kind: str, item: Mapping[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
    answer = messages[-1]
    if kind == "function_call":
        answer["tool_calls"].append(
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
        )
        return
    if kind == "reasoning":
        thoughts = [part["text"] for part in item.get("summary") or []]
        text = "".join(f"<think>{thought}</think>" for thought in thoughts if thought)
    else:
        text = message_text(item.get("content"))
    thinking = _THINKING.findall(text)
    answer["reasoning_content"] = answer["reasoning_content"] or (thinking[0] if thinking else "")
    answer["content"] += _THINKING.sub("", text)
