"""How replicas begin: addresses, then weights, all at the same time; and how a dead one begins again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ..failures import GenerationError, InfraError
from .member import Member, abandon, bounded
from .modes import Modes
from .settings import FleetSettings
from .states import ReplicaEvent

logger = logging.getLogger(__name__)


class Starts:
    """Reserves and starts replicas. Belongs to one event loop.

    Args:
        members: by name, in their order.
        modes: of the fleet.
        settings: deadlines.
        version: of the fleet's weights, now. It grows with every refit.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        modes: Modes,
        settings: FleetSettings,
        version: Callable[[], int],
    ) -> None:
        self._members = members
        self._modes = modes
        self._settings = settings
        self._version = version
        self._reserved = False

    @property
    def base_urls(self) -> list[str]:
        """One URL for each replica, in their order, or ``[]`` if none has a server.

        Raises:
            GenerationError: before :meth:`reserve`, or some replicas have a server and others have none.
        """
        if not self._reserved:
            raise GenerationError("fleet: its addresses are not reserved; call reserve() or start() first")
        urls = [member.url for member in self._members.values() if member.url is not None]
        if urls and len(urls) < len(self._members):
            without = ", ".join(name for name, member in self._members.items() if member.url is None)
            raise GenerationError(
                f"fleet: {without} reserved no address, and the other replicas did; give all a server or none"
            )
        return urls

    async def reserve(self) -> None:
        """Bind all addresses; once."""
        if not self._reserved:
            await self._together("reserve", self._reserve)
            self._reserved = True

    async def load(self) -> int:
        """Load all initial weights; their version.

        Raises:
            GenerationError: a replica did not start, or they have different versions.
        """
        await self._together("start", self._load)
        versions = {name: m.facts.weight_version for name, m in self._members.items() if m.facts}
        if len(set(versions.values())) != 1:
            raise GenerationError(f"fleet: its replicas began with different versions: {versions}")
        for member in self._members.values():
            # Nothing has been refitted, so what it loaded is what the fleet serves.
            member.report(ReplicaEvent.STARTED_CURRENT)
        return next(iter(versions.values()))

    async def again(self, member: Member) -> None:
        """Start a dead replica again and bring it into its next state.

        It is stale, unless no refit ever changed the weights that it loads.

        Raises:
            InfraError: the weights changed while it started, and it does not know that.
            Exception: it did not start.
        """
        last = member.facts
        current = last is not None and last.weight_version == self._version() and not self._modes.refitting
        await self._reserve(member)
        member.facts = await member.replica.start(stale=not current)
        async with self._modes.turn(self._settings.start_timeout_s):
            if not current:
                member.report(ReplicaEvent.STARTED)
            elif member.facts.weight_version == self._version():
                member.report(ReplicaEvent.STARTED_CURRENT)
            else:
                # Its server would answer with the old weights.
                raise InfraError(f"replica {member.name}: the fleet's weights changed while it started")
            await self._modes.follow([member])

    async def _reserve(self, member: Member) -> None:
        before, member.url = member.url, await member.replica.reserve()
        if before not in (None, member.url):
            logger.warning("replica %s: its address was %s, and is %s now", member.name, before, member.url)

    async def _load(self, member: Member) -> None:
        member.facts = await member.replica.start()

    async def _together(self, what: str, work: Callable[[Member], Coroutine[Any, Any, None]]) -> None:
        """Do something to all at once; the first failure ends the wait for the others."""
        tasks = [
            asyncio.ensure_future(
                bounded(work(member), f"replica {member.name}: {what}", self._settings.start_timeout_s)
            )
            for member in self._members.values()
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                abandon(task)
