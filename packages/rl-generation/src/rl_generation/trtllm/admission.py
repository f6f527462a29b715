"""Which requests may sample now, and which are sampling: what pauses, refits and ends need to know."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ..failures import DeadlineError, EngineDeadError
from ..fleet.threads import in_thread


class Gate:
    """Open unless somebody holds it. All on one event loop.

    Args:
        component: name that errors begin with.
    """

    def __init__(self, component: str) -> None:
        self._component = component
        self._holders: dict[str, None] = {}
        self._ended = False
        self._changed = asyncio.Condition()

    @property
    def holders(self) -> tuple[str, ...]:
        """Why it is closed, oldest first; empty when it is open."""
        return tuple(self._holders)

    def hold(self, why: str) -> None:
        """Close it; idempotent for one reason."""
        self._holders[why] = None

    async def release(self, why: str) -> None:
        """Give up one reason; idempotent."""
        self._holders.pop(why, None)
        await self._tell()

    async def end(self) -> None:
        """Let everybody through to their failure, for good."""
        self._ended = True
        await self._tell()

    async def pass_through(self, timeout_s: float) -> None:
        """Wait until it is open.

        Raises:
            DeadlineError: it stayed closed for too long; says why it is.
            EngineDeadError: it has ended.
        """
        if self._holders and not self._ended:
            try:
                async with asyncio.timeout(timeout_s), self._changed:
                    await self._changed.wait_for(lambda: self._ended or not self._holders)
            except TimeoutError as error:
                raise DeadlineError(
                    f"{self._component}: waited {timeout_s:g} s for the end of {', '.join(self._holders)}"
                ) from error
        if self._ended:
            raise EngineDeadError(f"{self._component}: used after shutdown; build a new engine")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Flight:
    """The engine's handles of requests that are being sampled. All on one event loop.

    Args:
        component: name that errors begin with.
    """

    def __init__(self, component: str) -> None:
        self._component = component
        self._handles: dict[int, Any] = {}
        self._landed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._handles)

    @contextmanager
    def boarding(self, handle: Any) -> Generator[None]:
        """The time in which the engine works on one request; whoever leaves it early aborts the request."""
        self._handles[id(handle)] = handle
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                handle.abort()
            raise
        finally:
            self._handles.pop(id(handle), None)

    async def land(self) -> None:
        """Tell those who wait that a request has left."""
        async with self._landed:
            self._landed.notify_all()

    async def abort_all(self, timeout_s: float) -> None:
        """Ask the engine to stop every request; it answers each with what it has sampled.

        Raises:
            DeadlineError: the engine did not take the orders in time.
        """
        handles = list(self._handles.values())

        def abort() -> None:
            for handle in handles:
                handle.abort()

        if handles:
            await in_thread(abort, f"{self._component}: aborting requests", timeout_s)

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Wait until no request is left.

        Raises:
            DeadlineError: some are; says how many.
        """
        try:
            async with asyncio.timeout(timeout_s), self._landed:
                await self._landed.wait_for(lambda: not self._handles)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._component}: {len(self._handles)} requests did not stop within {timeout_s:g} s"
            ) from error
