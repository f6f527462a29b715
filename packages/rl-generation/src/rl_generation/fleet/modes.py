"""What a fleet as a whole is allowed to do now, and whose turn it is to change that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Literal

from ..failures import BusyError, DeadlineError, GenerationError, InfraError
from .member import Member
from .replica import Replica
from .router import Router
from .settings import FleetSettings
from .states import ReplicaEvent

Mode = Literal["new", "running", "paused", "asleep", "closed"]
Work = Callable[[Replica], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)

_REMEDIES: dict[Mode, str] = {
    "new": "call start() first",
    "asleep": "call wake() first",
    "paused": "call resume() first",
    "closed": "build a new fleet",
}


class Modes:
    """The mode of a fleet. Belongs to one event loop.

    Args:
        members: all replicas.
        router: closed while nothing may be sampled.
        settings: deadlines.
    """

    def __init__(self, members: Sequence[Member], router: Router, settings: FleetSettings) -> None:
        self._members = members
        self._router = router
        self._settings = settings
        self._turn = asyncio.Lock()
        self._refitting = False
        self._changes = 0
        self._settled = True
        self.mode: Mode = "new"

    @property
    def refitting(self) -> bool:
        """Whether a refit is going on."""
        return self._refitting

    def quiet(self) -> tuple[bool, int]:
        """Whether replicas sample nothing now, and a number that changes whenever this may have changed."""
        return self.mode != "running" or self._refitting, self._changes

    def refuse(self, *modes: Mode) -> None:
        """Raise :class:`~rl_generation.failures.GenerationError` in one of these modes."""
        if self.mode in modes:
            raise GenerationError(f"fleet: it is {self.mode}; {_REMEDIES.get(self.mode, 'it runs already')}")

    @contextlib.asynccontextmanager
    async def turn(self, timeout_s: float) -> AsyncGenerator[None]:
        """Wait until no refit, change of mode or start goes on, and keep others from one.

        Raises:
            DeadlineError: it was another's turn for ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise DeadlineError(
                f"fleet: waited {timeout_s:g} s for a refit, a start or a change of mode to end"
            ) from error
        try:
            yield
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def refit(self) -> Generator[None]:
        """The time of a refit, in which replicas sample nothing."""
        self._refitting = True
        self._changes += 1
        try:
            yield
        finally:
            self._refitting = False
            self._changes += 1

    async def stop(
        self,
        what: str,
        work: Work,
        undo: Work,
        mode: Mode,
        ended: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Bring a running fleet, all live replicas, into a mode in which nothing is sampled.

        Nothing if it is in that mode already. If the caller gives up, it is in that mode and may be brought
        into it again, or out of it.

        Args:
            what: for errors.
            work: of every replica.
            undo: of ``work``, for the others when one replica refuses.
            mode: the new one.
            ended: waits for what has to end before the replicas are asked.

        Raises:
            GenerationError: this cannot be done in the present mode, or a replica that answers has refused:
                then the fleet runs as before.
        """
        async with self._change(mode, "running") as live:
            if live is None:
                return
            self.mode = mode
            # Before replicas are told to stop.
            self._router.set_open(False)
            self._changes += 1
            if ended is not None:
                await ended()
            refusals = await self._ask(what, work, live)
            if refusals:
                logger.warning("fleet: %s was refused and is undone: %s", what, refusals[0])
                await self._go_on(f"undoing {what}", undo, live)
                raise refusals[0]

    async def go_on(self, what: str, work: Work, mode: Mode) -> None:
        """Bring a fleet in ``mode`` back to work; nothing if it runs already.

        If the caller gives up, it is in ``mode`` still. A replica that does not follow is dead to the fleet:
        it is started again, and the others serve.

        Raises:
            GenerationError: this cannot be done in the present mode.
        """
        async with self._change("running", mode) as live:
            if live is not None:
                await self._go_on(what, work, live)

    async def follow(self, members: Iterable[Member]) -> None:
        """Bring replicas that know nothing of it into the fleet's mode."""
        settled, self._settled = self._settled, False
        if self.mode == "paused":
            await self._each("pause", lambda replica: replica.pause(), members)
        elif self.mode == "asleep":
            await self._each("sleep", lambda replica: replica.sleep(), members)
        self._settled = settled

    @contextlib.asynccontextmanager
    async def _change(self, mode: Mode, before: Mode) -> AsyncGenerator[list[Member] | None]:
        """The time of a change of mode; the replicas it concerns, ``None`` if there is nothing to change."""
        async with self.turn(self._settings.refit_call_timeout_s):
            if self.mode not in (mode, before):
                self.refuse(self.mode)
            if self.mode == mode and self._settled:
                yield None
                return
            # Until it is through: who gives up half way may begin again.
            self._settled = False
            self._changes += 1
            yield [member for member in self._members if member.live]
            self._settled = True
            self._changes += 1

    async def _go_on(self, what: str, work: Work, members: list[Member]) -> None:
        await self._each(what, work, members)
        # It may have been shut down meanwhile.
        self.refuse("closed")
        # After replicas were told to go on.
        self.mode, self._settled = "running", True
        self._router.set_open(True)
        self._changes += 1

    async def _each(self, what: str, work: Work, members: Iterable[Member]) -> None:
        """Do something to all in parallel; a replica that cannot follow the others is dead to the fleet."""
        for member, problem in await self._outcomes(what, work, list(members)):
            member.report(ReplicaEvent.DIED, problem)

    async def _ask(self, what: str, work: Work, members: list[Member]) -> list[GenerationError]:
        """Do something to all in parallel; what those say who refuse and go on as before.

        Who fails in another way, or is silent, is in a state that nobody knows, and so dead to the fleet.
        """
        refusals: list[GenerationError] = []
        for member, problem in await self._outcomes(what, work, members):
            if isinstance(problem, GenerationError) and (
                isinstance(problem, BusyError) or not isinstance(problem, InfraError)
            ):
                refusals.append(problem)
            else:
                member.report(ReplicaEvent.DIED, problem)
        return refusals

    async def _outcomes(self, what: str, work: Work, members: list[Member]) -> list[tuple[Member, Exception]]:
        # A pause may have to wait for requests, as a refit's first step has.
        timeout_s = self._settings.refit_call_timeout_s
        outcomes = await asyncio.gather(
            *(member.call(work(member.replica), what, timeout_s) for member in members),
            return_exceptions=True,
        )
        problems: list[tuple[Member, Exception]] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Exception):
                problems.append((member, outcome))
            elif outcome is not None:
                raise outcome
        return problems
