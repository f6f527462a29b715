"""How much of a request is read: whoever asks for more keeps all others waiting."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ..failures import InvalidRequestError
from .asgi import ClientGoneError, Receive
from .refusals import BodyTooLargeError
from .settings import ServerSettings

# What is below them is decoded, not tokenised: a part's ``image_url.url``, or its ``input_audio.data``.
_MEDIA = frozenset({"url", "data"})


async def read_document(receive: Receive, settings: ServerSettings) -> Any:
    """The JSON document of a request.

    Args:
        receive: the request's messages.
        settings: of the server.

    Raises:
        BodyTooLargeError: the body or the texts in it are too large; it is not read to its end then.
        ClientGoneError: it will never arrive.
        InvalidRequestError: it is no JSON.
    """
    parts: list[bytes] = []
    size = 0
    async for part in _parts(receive):
        size += len(part)
        if size > settings.max_body_bytes:
            raise BodyTooLargeError(
                f"server: the body has more than {settings.max_body_bytes} bytes; send less, or raise "
                "max_body_bytes of the server"
            )
        parts.append(part)
    try:
        document = json.loads(b"".join(parts))
        texts = sum(_texts(document))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"server: the body is not JSON: {error}") from error
    if texts > settings.max_text_bytes:
        raise BodyTooLargeError(
            f"server: the texts have {texts} bytes, more than the {settings.max_text_bytes} that could fit "
            f"into a context of {settings.max_context} tokens; send less"
        )
    return document


async def _parts(receive: Receive) -> AsyncGenerator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client went away")
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _texts(value: Any) -> Iterator[int]:
    """Bytes of every text in a document, but for media."""
    if isinstance(value, str):
        yield len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            if key not in _MEDIA or not isinstance(inner, str):
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, (str, dict, list)):
                yield from _texts(inner)
