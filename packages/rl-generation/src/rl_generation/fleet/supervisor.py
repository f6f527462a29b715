"""Keeps replicas alive: probes all of them in rounds, ends the dead and starts them again within a budget."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ..failures import EngineDeadError
from .member import Member, bounded
from .probes import Verdict, examine
from .settings import FleetSettings
from .states import ReplicaEvent, ReplicaState

logger = logging.getLogger(__name__)


class Supervisor:
    """Probes and restarts. Belongs to one event loop.

    Args:
        members: whom to look after.
        settings: deadlines and budgets.
        quiet: whether replicas cannot answer probes now, since they are paused, asleep or in a refit; and a
            number that changes whenever that changes.
        begin: loads the initial weights of a replica that is ``RESTARTING`` and brings it into its next
            state; raises if that fails.
    """

    def __init__(
        self,
        members: list[Member],
        settings: FleetSettings,
        quiet: Callable[[], tuple[bool, int]],
        begin: Callable[[Member], Coroutine[Any, Any, None]],
    ) -> None:
        self._members = members
        self._settings = settings
        self._quiet = quiet
        self._begin = begin
        self._tasks: set[asyncio.Task[None]] = set()
        self._poked = asyncio.Event()
        self._round = asyncio.Lock()
        self._stopped = False
        self.restarts = 0
        for member in members:
            member.machine.listen(self._reviver(member))

    def run(self) -> None:
        """Begin to probe; once."""
        self._keep(self._probe_for_ever())

    def poke(self) -> None:
        """Probe soon, because something looked wrong."""
        self._poked.set()

    async def stop(self, timeout_s: float) -> None:
        """End probes and restarts; nothing is started after it."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def probe_once(self) -> dict[Member, Verdict]:
        """One round of probes and what follows from it; nothing where replicas cannot answer now."""
        async with self._round:
            return await self._probe()

    async def round_ended(self) -> None:
        """Return when no probe is under way: an engine has a request in flight as long as one is."""
        async with self._round:
            pass

    async def _probe(self) -> dict[Member, Verdict]:
        is_quiet, epoch = self._quiet()
        members = [member for member in self._members if member.live]
        if is_quiet or not members:
            return {}
        lives = {member: member.life for member in members}
        verdicts = await examine(members, self._settings.probe_timeout_s)
        still_asked = self._quiet() == (False, epoch)
        for member, verdict in verdicts.items():
            if member.life != lives[member] or not member.live:
                continue
            # Whoever was paused in the middle of a probe could not answer it; the dead are dead all the same.
            if still_asked or isinstance(verdict.error, EngineDeadError):
                self._judge(member, verdict)
        return verdicts

    def _judge(self, member: Member, verdict: Verdict) -> None:
        if verdict.alive:
            member.failed_probes = 0
            if verdict.stale and member.state is not ReplicaState.STALE:
                member.report(ReplicaEvent.OUTDATED)
            elif member.state is ReplicaState.SUSPECT:
                member.report(ReplicaEvent.RECOVERED)
            return
        member.failed_probes += 1
        if (
            isinstance(verdict.error, EngineDeadError)
            or member.failed_probes >= self._settings.probe_failures
        ):
            member.report(ReplicaEvent.DIED, verdict.error)
        else:
            member.report(ReplicaEvent.FAILED, verdict.error)

    async def _probe_for_ever(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._poked.wait(), self._settings.probe_interval_s)
            self._poked.clear()
            try:
                await self.probe_once()
            except Exception:
                # Without probes nothing would ever be noticed again.
                logger.exception("fleet: a round of probes failed")
                await asyncio.sleep(self._settings.probe_interval_s)

    def _reviver(self, member: Member) -> Callable[[ReplicaState, ReplicaState], None]:
        def on_change(old: ReplicaState, new: ReplicaState) -> None:
            if new is ReplicaState.DEAD and not self._stopped:
                self._keep(self._revive(member))

        return on_change

    async def _revive(self, member: Member) -> None:
        await self.end(member)
        if member.machine.exhausted:
            logger.error("replica %s: all its restarts are used; it is given up", member.name)
            member.report(ReplicaEvent.RETIRE)
            return
        # The loop's timer may wake a little early.
        while (left := member.machine.seconds_to_restart) > 0:
            await asyncio.sleep(left)
        member.machine.fire(ReplicaEvent.RESTART)
        self.restarts += 1
        try:
            await bounded(
                self._begin(member), f"replica {member.name}: start", self._settings.start_timeout_s
            )
        except Exception as error:
            logger.warning("replica %s: did not start again: %s", member.name, error)
            member.report(ReplicaEvent.DIED, error)

    async def end(self, member: Member) -> None:
        """Kill a replica's process, or say that it could not be done in time."""
        try:
            await bounded(
                member.replica.kill(), f"replica {member.name}: kill", self._settings.control_timeout_s
            )
        except Exception as error:
            logger.warning("%s", error)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
