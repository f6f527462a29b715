"""What must hold of a conversation's messages beyond the types of their fields."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..failures import InvalidRequestError

if TYPE_CHECKING:
    from .schemas import ChatMessage

# Of OpenAI's messages and ours. Others belong to a chat template, unless they are nearly one of these.
_FIELDS = (
    "annotations",
    "audio",
    "content",
    "function_call",
    "generation_log_probs",
    "generation_token_ids",
    "name",
    "prompt_token_ids",
    "reasoning",
    "reasoning_content",
    "refusal",
    "role",
    "tool_call_id",
    "tool_calls",
    "weight_versions",
)
_NEARLY = 0.85


def require_unicode(document: Any) -> None:
    """Refuse half of a surrogate pair, which JSON can spell and no tokenizer can read.

    Args:
        document: of JSON.

    Raises:
        InvalidRequestError: there is one; names its place.
    """
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        place = next(_broken(document, ""), "")
        raise InvalidRequestError(
            f"server: {place or 'the body'} has half of a surrogate pair, which is no character; send whole "
            "ones",
            place,
        ) from None
    except RecursionError as error:
        raise InvalidRequestError("server: the body is nested too deeply; send a flatter one") from error


def check_messages(messages: Sequence[ChatMessage], required_prefix: Sequence[int] | None) -> None:
    """Refuse messages that say nothing, are misspelt, or carry tokens that cannot be those of the history.

    Args:
        messages: of a conversation.
        required_prefix: tokens that are given beside them.

    Raises:
        InvalidRequestError: names the message and the field.
    """
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        for name in message.model_extra or {}:
            near = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=_NEARLY)
            if name not in _FIELDS and near:
                raise InvalidRequestError(
                    f"server: unknown field {name!r} of {where}; did you mean {near[0]!r}?", f"{where}.{name}"
                )
        if message.content is None and message.role != "assistant":
            raise InvalidRequestError(
                f"server: {where} of role {message.role!r} has no content; give a text, even an empty one",
                f"{where}.content",
            )
        _check_tokens(message, index)
    if required_prefix is not None and not required_prefix:
        raise InvalidRequestError(
            "server: required_prefix_token_ids is empty, so the whole history would be dropped; leave it out",
            "required_prefix_token_ids",
        )


def _check_tokens(message: ChatMessage, index: int) -> None:
    where = f"messages.{index}"
    if index and message.prompt_token_ids is not None and not message.prompt_token_ids:
        raise InvalidRequestError(
            f"server: {where}.prompt_token_ids is empty, so the messages before it would be dropped; give "
            "the tokens of its prompt, or leave them out",
            f"{where}.prompt_token_ids",
        )
    sampled = message.generation_token_ids
    for name in ("generation_log_probs", "weight_versions"):
        values = getattr(message, name)
        if values is not None and sampled is not None and len(values) != len(sampled):
            raise InvalidRequestError(
                f"server: {where}.{name} has {len(values)} entries for {len(sampled)} generation_token_ids; "
                "give one each, or leave them out",
                f"{where}.{name}",
            )


def _broken(value: Any, place: str) -> Iterator[str]:
    """Places of texts, keys included, that are no Unicode."""
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            yield place
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _broken(key, place)
            yield from _broken(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _broken(inner, f"{place}.{index}" if place else str(index))
