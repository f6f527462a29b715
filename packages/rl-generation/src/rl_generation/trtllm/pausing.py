"""Stopping all requests of an engine for a while, for one reason or several at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ..failures import DeadlineError, GenerationError
from .admission import Flight, Gate
from .faults import classified


class Pauses:
    """Makes an engine give back its requests, keeps new ones waiting, and lets all go on in the end.

    Args:
        component: name that errors begin with.
        flight: the requests that the engine works on.
        timeout_s: for the requests to stop, and for others to wait.
    """

    def __init__(self, component: str, flight: Flight, timeout_s: float) -> None:
        self._component = component
        self._flight = flight
        self._timeout_s = timeout_s
        self._gate = Gate(component)
        self._llm: Any = None
        self._llm_is_stopped = False
        # Otherwise one reason's end would undo another's beginning, or hide it.
        self._turn = asyncio.Lock()
        self.count = 0
        """Of stops so far. A request that comes back aborted while this has grown was aborted by a stop."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why requests wait, oldest first; empty when they do not."""
        return self._gate.holders

    def attach(self, llm: Any, *, stops_itself: bool) -> None:
        """Name the engine.

        Args:
            llm: an ``AsyncLLM`` that is set up.
            stops_itself: whether it can abort all requests and wait until none is left. It then refuses new
                ones until it is told to go on.
        """
        self._llm = llm if stops_itself else None

    async def pass_through(self) -> None:
        """Wait for the end of every pause.

        Raises:
            DeadlineError: that took too long.
            EngineDeadError: the engine was shut down.
        """
        await self._gate.pass_through(self._timeout_s)

    async def hold(self, why: str) -> None:
        """Stop all requests and admit none; idempotent for one reason. Waits for other calls to end.

        Raises:
            DeadlineError: some did not stop; then all go on.
            EngineDeadError: a worker is gone.
        """
        async with self._turn:
            await self._hold(why)

    async def release(self, why: str) -> None:
        """Give up one reason; idempotent. Waits for other calls to end.

        Raises:
            DeadlineError: the engine did not say in time that it goes on.
            GenerationError: it cannot. Requests are let through to its own failure, and the next release of
                any reason asks it again.
        """
        async with self._turn:
            await self._release(why)

    async def end(self) -> None:
        """Let everybody through to their failure, for good."""
        await self._gate.end()

    async def _hold(self, why: str) -> None:
        self._gate.hold(why)
        self.count += 1
        try:
            with classified(self._component, "stop requests"):
                async with asyncio.timeout(self._timeout_s):
                    if self._llm is not None:
                        self._llm_is_stopped = True
                        await self._llm.pause_generation()
                    else:
                        await self._flight.abort_all(self._timeout_s)
                    await self._flight.wait_until_empty(self._timeout_s)
        except TimeoutError as error:
            await self._release_anyway(why)
            raise DeadlineError(
                f"{self._component}: requests did not stop within {self._timeout_s:g} s"
            ) from error
        except BaseException:
            await self._release_anyway(why)
            raise

    async def _release(self, why: str) -> None:
        try:
            if self._llm_is_stopped and set(self._gate.holders) <= {why}:
                await self._go_on()
        finally:
            await self._gate.release(why)

    async def _release_anyway(self, why: str) -> None:
        """Where something failed already that says more."""
        with contextlib.suppress(GenerationError):
            await self._release(why)

    async def _go_on(self) -> None:
        try:
            with classified(self._component, "go on"):
                async with asyncio.timeout(self._timeout_s):
                    await self._llm.resume_generation()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._component}: the engine did not go on within {self._timeout_s:g} s"
            ) from error
        self._llm_is_stopped = False
