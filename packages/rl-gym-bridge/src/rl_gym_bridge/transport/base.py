"""What the client needs from an HTTP library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer that arrived whole.

    Attributes:
        status: HTTP status.
        body: the undecoded content.
    """

    status: int
    body: bytes


class Transport(Protocol):
    """HTTP without cookies, redirects, proxies or retries, on one event loop.

    Each call raises :class:`~rl_gym_bridge.failures.GymUnavailable` if nothing of the request can have reached a
    server, :class:`~rl_gym_bridge.failures.GymConnectionLost` if it may have, and
    :class:`~rl_gym_bridge.failures.GymTimeout` if ``timeout_s`` (for everything, from the first byte sent to the
    last one received) passed.
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
