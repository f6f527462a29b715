"""One client per event loop, for as long as something on that loop uses it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from ..client import GymClient
from ..config import NemoGymConfig
from .choice import choose_transport

if TYPE_CHECKING:
    import asyncio


class SharedClients:
    """Makes clients by a run's settings. All uses on one loop share one, and with it the bound on rollouts.

    Args:
        config: of the bridge.
    """

    def __init__(self, config: NemoGymConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._leased: dict[asyncio.AbstractEventLoop, _Lease] = {}

    @contextlib.asynccontextmanager
    async def lease(self, agents: Mapping[str, str]) -> AsyncGenerator[GymClient, None]:
        """The client of the running loop, which is closed when its last use ends.

        Args:
            agents: base URL of each agent by name.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        with self._lock:
            lease = self._leased.get(loop)
            if lease is None:
                lease = self._leased[loop] = _Lease(self._client(agents))
            lease.users += 1
        try:
            yield lease.client
        finally:
            with self._lock:
                lease.users -= 1
                if not lease.users:
                    del self._leased[loop]
            if not lease.users:
                await lease.client.aclose()

    def _client(self, agents: Mapping[str, str]) -> GymClient:
        config = self._config
        return GymClient(
            agents,
            transport=choose_transport(config.transport, max_concurrency=config.max_concurrency),
            retry=config.retry,
            max_concurrency=config.max_concurrency,
            rollout_timeout_s=config.rollout_timeout_s,
        )


class _Lease:
    __slots__ = ("client", "users")

    def __init__(self, client: GymClient) -> None:
        self.client = client
        self.users = 0
