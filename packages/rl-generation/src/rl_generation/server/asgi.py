"""What the servers need of ASGI, and no more: types, a body in, a JSON document out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGoneError(ConnectionError):
    """The client closed the connection before its request had arrived."""


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request.

    Raises:
        ClientGoneError: it will never arrive.
    """
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client went away")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def first_of(receive: Receive, hung_up: asyncio.Event) -> Message:
    """The client's next message, or that it has gone, as soon as ``hung_up`` is set."""
    message = asyncio.ensure_future(receive())
    end = asyncio.ensure_future(hung_up.wait())
    try:
        await asyncio.wait({message, end}, return_when=asyncio.FIRST_COMPLETED)
        return message.result() if message.done() else {"type": "http.disconnect"}
    finally:
        message.cancel()
        end.cancel()


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a request header given in lower case; ``None`` where it is missing."""
    return next((value for key, value in scope.get("headers", ()) if key == name), None)


def to_json(document: Any) -> bytes:
    """Compact JSON; refuses NaN and infinities, which are no JSON.

    Raises:
        ValueError: a number that JSON has not.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A half of a surrogate pair, which a client can send escaped, is no UTF-8; so it is escaped again.
    return text.encode(errors="backslashreplace")


async def send_json(send: Send, status: int, document: Any, headers: Mapping[str, str] | None = None) -> None:
    """Answer with a JSON document; raises what :func:`to_json` does."""
    await send_body(send, status, to_json(document), headers)


async def send_body(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Answer with what :func:`to_json` made."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
