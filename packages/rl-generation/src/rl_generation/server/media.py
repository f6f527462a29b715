"""What a message may hold beside text: bytes that it brings along. A server fetches nothing for a client.

Whoever may sample could otherwise have the machine ask any address that it reaches, such as a cloud's
metadata service, or read files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..failures import InvalidRequestError
from .schemas import ChatMessage

_TEXT = frozenset({"input_text", "output_text", "refusal", "text", "thinking"})
_BY_URL = frozenset({"audio_url", "image_url", "video_url"})
_TYPES = _TEXT | _BY_URL | {"input_audio", "input_image"}
# Tensors to unpickle, or a name for media that another request has brought.
_REFUSED = ("audio_embeds", "image_embeds", "image_pil", "prompt_embeds", "uuid", "video_embeds")
_SCHEME = "data:"


def check_media(messages: Sequence[ChatMessage]) -> None:
    """Look at every part of every message, whatever type it says that it has.

    Raises:
        InvalidRequestError: a part has a URL other than ``data:``, or is neither text nor media that a
            message can bring along.
    """
    for place, message in enumerate(messages):
        if isinstance(message.content, list):
            for part in message.content:
                _check(part, f"messages.{place}.content")


def _check(part: Mapping[str, Any], where: str) -> None:
    for name in _BY_URL & set(part):
        url = part[name]
        if isinstance(url, Mapping):
            url = url.get("url")
        if not isinstance(url, str) or not url.startswith(_SCHEME):
            raise InvalidRequestError(
                f"server: {where} has an {name} that is no {_SCHEME} URL; this server fetches nothing, so "
                f"send the bytes as {_SCHEME}<type>;base64,<bytes>",
                where,
            )
    odd = next((name for name in _REFUSED if part.get(name) is not None), None)
    if odd is not None:
        raise InvalidRequestError(
            f"server: {where} has {odd}, which this server does not take; send text, or media as "
            f"{_SCHEME} URLs",
            where,
        )
    kind = part.get("type")
    if kind is not None and (not isinstance(kind, str) or kind not in _TYPES):
        raise InvalidRequestError(
            f"server: {where} has a part of the type {kind!r}; expected one of {', '.join(sorted(_TYPES))}",
            where,
        )
