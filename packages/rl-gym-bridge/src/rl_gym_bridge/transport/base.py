"""What the client needs from an HTTP library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

#: Seconds until a connection must stand. Nothing was sent before, so giving up here is safe to repeat.
CONNECT_TIMEOUT_S = 30.0
#: Seconds an unused connection is kept. Shorter than what servers keep (uvicorn: 5 s): a request that meets a
#: connection which its server is closing may or may not have been delivered.
KEEPALIVE_S = 2.0
#: The longest answer that is read, in bytes.
MAX_ANSWER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer that arrived whole.

    Attributes:
        status: HTTP status.
        body: the content, as it was sent.
        retry_after: value of the header ``Retry-After``, empty where there was none.
    """

    status: int
    body: bytes
    retry_after: str = ""


class Transport(Protocol):
    """HTTP without cookies, redirects, proxies or retries, on one event loop.

    Each call raises :class:`~rl_gym_bridge.failures.GymUnavailable` if nothing of the request can have
    reached a server, :class:`~rl_gym_bridge.failures.GymConnectionLost` if it may have, and
    :class:`~rl_gym_bridge.failures.GymTimeout` if ``timeout_s`` (for everything, from the connection to the
    last byte received) passed. An answer that is too long or compressed is a
    :class:`~rl_gym_bridge.failures.GymAnswerError`. Cancelling a call closes its connection. How many calls
    run at the same time is bounded by the caller, not here.
    """

    async def post(
        self, url: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """POST a JSON document."""
        ...

    async def get(self, url: str, *, timeout_s: float) -> HttpAnswer:
        """GET a document."""
        ...

    async def aclose(self) -> None:
        """Close every connection; further calls are errors."""
        ...
