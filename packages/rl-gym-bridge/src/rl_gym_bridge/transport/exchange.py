"""What every transport does the same way, whichever library it uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from .base import HttpAnswer


class Exchanging(ABC):
    """A transport whose requests all go through one method."""

    async def post(
        self, url: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """See :class:`~rl_gym_bridge.transport.base.Transport`."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        return await self._exchange("POST", url, body, timeout_s=timeout_s, headers=sent)

    async def get(self, url: str, *, timeout_s: float) -> HttpAnswer:
        """See :class:`~rl_gym_bridge.transport.base.Transport`."""
        return await self._exchange("GET", url, None, timeout_s=timeout_s, headers={})

    @abstractmethod
    async def _exchange(
        self, method: str, url: str, body: bytes | None, *, timeout_s: float, headers: Mapping[str, str]
    ) -> HttpAnswer:
        """Send one request and read its whole answer."""


def said(error: Exception) -> str:
    """An error of a library in words: its class, and its text where it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
