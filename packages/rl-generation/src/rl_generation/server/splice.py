"""Earlier turns as the very tokens that they were, whatever their text would be tokenised to.

Decoding and encoding again is not the identity, so a prompt is never built from the text of an answer that
was sampled. Of a conversation whose message ``i`` carries its tokens, only what the chat template puts
*behind* that message is tokenised. It is found by rendering the conversation with a marker in its place.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import InvalidRequestError

ChatMessages = Sequence[Mapping[str, Any]]
Render = Callable[[list[dict[str, Any]], bool], Awaitable[str]]
"""From messages, and whether the header of the next answer follows, to text; raises
:class:`InvalidRequestError` where the chat template refuses them."""

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "weight_versions")
"""What an answer's message carries of its tokens, and the history may give back."""


@dataclass(frozen=True, slots=True)
class CarriedTokens:
    """The tokens that a conversation brings along.

    Attributes:
        index: of the message that they end with.
        token_ids: everything up to its end.
    """

    index: int
    token_ids: tuple[int, ...]


def carried_tokens(
    messages: ChatMessages, required_prefix: Sequence[int] | None = None
) -> CarriedTokens | None:
    """The tokens of the last message that carries any, or those that are given for the last answer.

    Raises:
        InvalidRequestError: a message that no model sampled carries tokens, one carries half of what it
            should, or there is no answer for the tokens that are given.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        prompt, sampled = message.get("prompt_token_ids"), message.get("generation_token_ids")
        if prompt is None and sampled is None:
            continue
        where = f"messages.{index}"
        if index not in answers:
            raise InvalidRequestError(
                f"server: {where} carries tokens but is of role {message.get('role')!r}; only an answer may",
                where,
            )
        if prompt is None or sampled is None:
            missing = "prompt_token_ids" if prompt is None else "generation_token_ids"
            raise InvalidRequestError(
                f"server: {where} carries tokens without {missing}; give both or neither",
                f"{where}.{missing}",
            )
        if required_prefix is None:
            return CarriedTokens(index, (*prompt, *sampled))
        break
    if required_prefix is None:
        return None
    if not answers:
        raise InvalidRequestError(
            "server: required_prefix_token_ids needs an assistant message that it ends with",
            "required_prefix_token_ids",
        )
    return CarriedTokens(answers[-1], tuple(required_prefix))


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise :class:`InvalidRequestError` where a token is none of the model's."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequestError(
            f"server: the messages carry token ids in {min(token_ids)}..{max(token_ids)}, outside the "
            f"vocabulary 0..{vocab_size - 1}; they are those of another model",
            "messages",
        )


async def spliced_prompt(
    messages: ChatMessages,
    carried: CarriedTokens,
    render: Render,
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """The tokens of ``carried``, followed by those of what the template puts behind them.

    Args:
        messages: the whole conversation.
        carried: what it brings along.
        render: the chat template.
        encode: text to token ids, nothing added.

    Raises:
        InvalidRequestError: the template refuses the conversation, or changes an answer's text.
    """
    tail = list(encode(await _text_behind(messages, carried.index, render)))
    seen = carried.token_ids
    if tail and seen and tail[0] == seen[-1]:
        # The end of the turn was sampled. Where the answer was cut off, it belongs to the new prompt.
        del tail[0]
    return [*seen, *tail]


async def _text_behind(messages: ChatMessages, index: int, render: Render) -> str:
    marker = _marker(messages)
    try:
        text = await render(_marked(messages, index, marker, with_calls=False), True)
    except InvalidRequestError:
        if not messages[index].get("tool_calls"):
            raise
        # Some templates take a tool's output only behind a call of it.
        text = await render(_marked(messages, index, marker, with_calls=True), True)
        return await _behind_calls(text, marker, render)
    _, found, behind = text.rpartition(marker)
    if not found:
        raise _scattered()
    return behind


async def _behind_calls(text: str, marker: str, render: Render) -> str:
    plain = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
    closing = (await render(plain, False)).rpartition(marker)[2]
    place = text.rfind(marker)
    end = text.find(closing, place) if closing and place >= 0 else -1
    if end < 0:
        raise _scattered()
    return text[end:]


def _marked(messages: ChatMessages, index: int, marker: str, *, with_calls: bool) -> list[dict[str, Any]]:
    """The conversation with the marker for message ``index``, and nothing that was sampled before it."""
    marked: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        if message.get("role") != "assistant" or position > index:
            marked.append({key: value for key, value in message.items() if key not in TOKEN_FIELDS})
            continue
        plain: dict[str, Any] = {"role": "assistant", "content": marker if position == index else "."}
        if with_calls and message.get("tool_calls"):
            plain["tool_calls"] = [_without_arguments(call) for call in message["tool_calls"]]
        marked.append(plain)
    return marked


def _without_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    # Sampled arguments may be broken, or hold what ends a turn.
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return {**call, "function": {"name": name or "tool", "arguments": "{}"}}


def _marker(messages: ChatMessages) -> str:
    said = json.dumps([message.get("content") for message in messages], ensure_ascii=False, default=str)
    number = 0
    while (marker := f"\u241f{number}\u241f") in said:
        number += 1
    return marker


def _scattered() -> InvalidRequestError:
    return InvalidRequestError(
        "server: the chat template changes an assistant's text, so that tokens cannot be kept over turns; "
        "use a template that writes it out as it is",
        "messages",
    )
