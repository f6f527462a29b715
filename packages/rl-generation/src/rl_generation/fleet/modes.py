"""What a fleet as a whole is allowed to do now, and whose turn it is to change that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Literal

from ..failures import DeadlineError, GenerationError
from .member import Member
from .replica import Replica
from .router import Router
from .settings import FleetSettings
from .states import ReplicaEvent

Mode = Literal["new", "running", "paused", "asleep", "closed"]
Work = Callable[[Replica], Coroutine[Any, Any, None]]

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

    async def switch(self, what: str, work: Work, allowed: Sequence[Mode], mode: Mode) -> None:
        """Do something to all live replicas, and be in ``mode`` afterwards; nothing if it is already.

        Raises:
            GenerationError: this cannot be done in the present mode.
        """
        async with self.turn(self._settings.refit_call_timeout_s):
            if self.mode not in allowed:
                self.refuse(self.mode)
            if self.mode == mode:
                return
            self.mode = mode
            self._changes += 1
            # Before replicas are told to stop, and after they were told to go on.
            if mode != "running":
                self._router.set_open(False)
            await self.each(what, work, [member for member in self._members if member.live])
            if mode == "running":
                self._router.set_open(True)
            self._changes += 1

    async def follow(self, members: Iterable[Member]) -> None:
        """Bring replicas that know nothing of it into the fleet's mode."""
        if self.mode == "paused":
            await self.each("pause", lambda replica: replica.pause(), members)
        elif self.mode == "asleep":
            await self.each("sleep", lambda replica: replica.sleep(), members)

    async def each(self, what: str, work: Work, members: Iterable[Member]) -> None:
        """Do something to all in parallel; a replica that cannot follow the others is dead to the fleet."""
        members = list(members)
        timeout_s = self._settings.control_timeout_s
        outcomes = await asyncio.gather(
            *(member.call(work(member.replica), what, timeout_s) for member in members),
            return_exceptions=True,
        )
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Exception):
                member.report(ReplicaEvent.DIED, outcome)
            elif outcome is not None:
                raise outcome
