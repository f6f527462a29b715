"""A fleet on its event loop: the parts bound together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..failures import GenerationError, NoReplicaError, RefitError
from ..protocol import Completion, GenerationRequest
from ..refit.contract import WeightSource
from .dispatch import Dispatcher
from .member import Member, bounded
from .modes import Modes, Work
from .refits import FleetRefit
from .replica import Replica
from .router import Router
from .settings import FleetSettings
from .starts import Starts
from .states import ReplicaEvent, ReplicaState
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

# Shares of a shutdown's time.
_STOPPING, _ASKING, _KILLING = 0.1, 0.6, 0.3


class FleetCore:
    """What :class:`~rl_generation.fleet.fleet.Fleet` does, as coroutines of one event loop.

    Args:
        replicas: at least one; their names differ.
        settings: deadlines and budgets.
        clock: of the loop that everything will run on.

    Attributes:
        members: the replicas, by name.
        version: of the weights that the fleet serves.

    Raises:
        ValueError: no replicas, two with one name, or several that would be refitted by a collective.
    """

    def __init__(
        self, replicas: Sequence[Replica], settings: FleetSettings, clock: Callable[[], float]
    ) -> None:
        if not replicas:
            raise ValueError("a fleet needs at least one replica")
        self.members = {r.name: Member(r, settings.restarts, clock) for r in replicas}
        if len(self.members) < len(replicas):
            raise ValueError(f"replicas need different names, got {', '.join(r.name for r in replicas)}")
        if settings.transport == "collective" and len(replicas) > 1:
            # Its members are counted before anybody knows who will be alive.
            raise ValueError(
                f"transport is 'collective' for {len(replicas)} replicas: one that is dead or drops out "
                "would fail the refit of all; choose shared_memory on one machine and object_store on "
                "several, or build one replica over all GPUs"
            )
        self.version = 0
        self._settings = settings
        self._router = Router()
        for member in self.members.values():
            self._router.add(member.machine)
        members = list(self.members.values())
        self._modes = Modes(members, self._router, settings)
        self._starts = Starts(self.members, self._modes, settings, lambda: self.version)
        self._supervisor = Supervisor(members, settings, self._modes.quiet, self._starts.again)
        self._dispatcher = Dispatcher(
            self.members, self._router, settings, lambda: self.version, self._supervisor.poke
        )
        self._refits = 0
        self._refit_seconds = 0.0
        self._last_refit_seconds = 0.0

    @property
    def base_urls(self) -> list[str]:
        """See :attr:`rl_generation.fleet.starts.Starts.base_urls`."""
        return self._starts.base_urls

    async def reserve(self) -> list[str]:
        """Bind all addresses, in parallel; called again it only says what they are."""
        self._modes.refuse("closed")
        async with self._modes.turn(self._settings.start_timeout_s):
            await self._starts.reserve()
        return self.base_urls

    async def start(self) -> None:
        """Reserve, then load all initial weights in parallel; after a failure everything is ended.

        Raises:
            GenerationError: called twice, a replica did not start (the first cause), or they have different
                versions.
        """
        async with self._modes.turn(self._settings.start_timeout_s):
            # Another's start, while this one waited for its turn, stays as it is.
            self._modes.refuse("running", "paused", "asleep", "closed")
            try:
                await self._starts.reserve()
                # Some may have none.
                _ = self.base_urls
                self.version = await self._starts.load()
                self._modes.refuse("closed")
            except BaseException:
                await asyncio.shield(self.shutdown(self._settings.control_timeout_s))
                raise
            self._modes.mode = "running"
        self._supervisor.run()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :meth:`rl_generation.fleet.dispatch.Dispatcher.generate`."""
        self._modes.refuse("new", "asleep", "closed")
        return await self._dispatcher.generate(requests)

    async def refit(self, source: WeightSource, version: int) -> list[str]:
        """Give all live replicas new weights; names of those that serve them.

        Raises:
            RefitError: no replica completed it, or the version is not larger than the fleet's.
            NoReplicaError: none was live in time.
            GenerationError: the source failed.
        """
        self._modes.refuse("new", "asleep", "closed")
        return await self._refit(source, version)

    async def refit_stale(self, source: WeightSource) -> list[str]:
        """Give stale replicas the weights of the fleet's version; names of those that serve now."""
        self._modes.refuse("new", "asleep", "closed")
        async with self._modes.turn(self._settings.refit_timeout_s):
            self._modes.refuse("asleep", "closed")
            stale = [member for member in self.members.values() if member.state is ReplicaState.STALE]
            return await self._refit_these(stale, source, self.version) if stale else []

    async def pause(self) -> None:
        """Hand out no more requests, and stop sampling.

        Raises:
            GenerationError: a replica refused, such as one whose requests in flight outlast its deadline; the
                fleet runs as before.
        """
        await self._modes.stop("pause", lambda r: r.pause(), lambda r: r.resume(), "paused")

    async def resume(self) -> None:
        """Undo :meth:`pause`."""
        await self._modes.go_on("resume", lambda r: r.resume(), "paused")

    async def sleep(self) -> None:
        """Let replicas give memory back.

        Raises:
            GenerationError: a generation is in flight (said without waiting), the fleet is paused, or a
                replica refused, such as one that works on a request over HTTP; the fleet runs as before.
        """
        if self._dispatcher.active:
            raise GenerationError(
                f"fleet: cannot sleep while {self._dispatcher.active} generations are in flight; "
                "wait for them to return first"
            )
        await self._modes.stop(
            "sleep", lambda r: r.sleep(), lambda r: r.wake(), "asleep", self._supervisor.round_ended
        )

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        await self._modes.go_on("wake", lambda r: r.wake(), "asleep")

    async def health(self) -> dict[str, Any]:
        """The fleet's state, and every live replica's own facts."""
        live = [member for member in self.members.values() if member.live]
        timeout_s = self._settings.control_timeout_s
        found = await asyncio.gather(
            *(m.call(m.replica.health(), "health", timeout_s) for m in live), return_exceptions=True
        )
        facts = {
            member.name: {"error": str(outcome)} if isinstance(outcome, BaseException) else outcome
            for member, outcome in zip(live, found, strict=True)
        }
        return {
            "state": self._modes.mode,
            "weight_version": self.version,
            "serving": len(self._router.serving),
            "replicas": {name: self._described(m, facts.get(name)) for name, m in self.members.items()},
        }

    def metrics(self) -> dict[str, float]:
        """Counts and seconds since the start."""
        traffic = self._dispatcher.traffic
        return {
            "serving": len(self._router.serving),
            "requests": traffic.requests,
            "tokens": traffic.tokens,
            "seconds": traffic.seconds,
            "tokens_per_second": traffic.tokens / traffic.seconds if traffic.seconds else 0.0,
            "sent_again": traffic.sent_again,
            "failed_calls": traffic.failed_calls,
            "restarts": self._supervisor.restarts,
            "refits": self._refits,
            "refit_seconds": self._last_refit_seconds,
            "refit_seconds_total": self._refit_seconds,
        }

    async def shutdown(self, timeout_s: float) -> None:
        """End everything in parallel; idempotent. What does not end by itself is killed."""
        if self._modes.mode == "closed":
            return
        self._modes.mode = "closed"
        await self._supervisor.stop(_STOPPING * timeout_s)
        for member in self.members.values():
            member.report(ReplicaEvent.RETIRE)
            member.give_up(NoReplicaError(f"replica {member.name}: the fleet was shut down"))
        asked_s = _ASKING * timeout_s
        await self._end("shutdown", lambda replica: replica.shutdown(asked_s), asked_s)
        await self._end("kill", lambda replica: replica.kill(), _KILLING * timeout_s)

    async def _end(self, what: str, work: Work, timeout_s: float) -> None:
        members = list(self.members.values())
        endings = await asyncio.gather(
            *(bounded(work(m.replica), f"replica {m.name}: {what}", timeout_s) for m in members),
            return_exceptions=True,
        )
        for member, ending in zip(members, endings, strict=True):
            if isinstance(ending, Exception):
                logger.warning("replica %s: %s failed: %s", member.name, what, ending)

    async def _refit(self, source: WeightSource, version: int) -> list[str]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.replica_wait_s
        while True:
            async with self._modes.turn(self._settings.refit_timeout_s):
                self._modes.refuse("asleep", "closed")
                if version <= self.version:
                    raise RefitError(
                        f"fleet: a refit to version {version} after version {self.version}; expected a "
                        "larger one, or refit_stale for those that missed it"
                    )
                live = [member for member in self.members.values() if member.live]
                if live:
                    return await self._refit_these(live, source, version)
            left = deadline - loop.time()
            gone = all(member.state is ReplicaState.RETIRED for member in self.members.values())
            if left <= 0 or gone:
                raise NoReplicaError(f"fleet: no replica can take new weights ({self._router.describe()})")
            await self._router.wait_change(left)

    async def _refit_these(self, members: list[Member], source: WeightSource, version: int) -> list[str]:
        began = asyncio.get_running_loop().time()
        refit = FleetRefit(members, source, version, self._settings)
        with self._modes.refit():
            try:
                await refit.run()
            finally:
                # Also when the caller gave up after the last acknowledgement.
                if refit.refitted:
                    self.version = version
                    self._refits += 1
        self._last_refit_seconds = asyncio.get_running_loop().time() - began
        self._refit_seconds += self._last_refit_seconds
        # A refit ends with sampling, whatever was before it.
        await self._modes.follow(refit.refitted)
        return [member.name for member in refit.refitted]

    def _described(self, member: Member, facts: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "state": str(member.state),
            "url": member.url,
            "pid": member.facts.pid if member.facts else None,
            "outstanding": self._router.endpoint(member.name).outstanding,
            "failures": member.machine.failures,
            "restarts": member.machine.restarts,
            "tokens": member.tokens,
            "engine": facts or {},
        }
