"""Notices that a process of Gym has ended, and says so in place of the errors which that causes."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from ..failures import (
    GymConnectionLost,
    GymError,
    GymServerDied,
    GymStopped,
    GymTimeout,
    GymUnavailable,
    kind_of,
)
from ..trajectory import FailureKind

if TYPE_CHECKING:
    import asyncio

#: How often Gym's processes are looked at while rollouts run; it costs microseconds each.
PERIOD_S = 0.5
_PROBE_S = 3.0
#: For so long an answer to "which servers answer" holds; a storm of failures asks it once.
_FRESH_S = 1.0


class Gym(Protocol):
    """What can be asked about a Gym."""

    def check(self) -> None:
        """Raises GymServerDied if a process has ended; without a request."""

    def health(self, timeout_s: float = ...) -> None:
        """Raises GymServerDied if a server does not answer."""


class HealthWatch:
    """Knows whether a Gym is dead.

    A server whose process has ended is not coming back, and Gym may wait for it without an end: what runs
    is stopped. One that only does not answer may be busy, so that is said of a failed rollout, and nothing is
    stopped.

    Attributes:
        dead: why Gym is dead, ``None`` as long as it is not.
    """

    def __init__(self, gym: Gym) -> None:
        self._gym = gym
        self.dead: GymServerDied | None = None
        self._asked_at = float("-inf")
        self._last: GymServerDied | None = None
        # Runs come and go on loops of their own, which nothing here may keep.
        self._asking: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )

    def is_dead(self) -> bool:
        """Look at Gym's processes."""
        if self.dead is None:
            try:
                self._gym.check()
            except GymServerDied as error:
                self.dead = error
            except GymError:
                # What cannot be seen now need not be dead.
                pass
        return self.dead is not None

    @contextlib.asynccontextmanager
    async def watching(self, stop: asyncio.Event) -> AsyncGenerator[None, None]:
        """Set ``stop`` when Gym is found dead inside the block."""
        import asyncio

        async def watch() -> None:
            while not self.is_dead():
                await asyncio.sleep(PERIOD_S)
            stop.set()

        task = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def explained(self, error: GymError) -> GymError:
        """``error``, or if a server's death or silence explains it, an error that names the server."""
        if kind_of(error) is not FailureKind.INFRA:
            return error
        if self.is_dead() and self.dead is not None:
            return because(self.dead, error)
        if isinstance(error, (GymUnavailable, GymConnectionLost, GymTimeout)):
            silent = await self._silent()
            if silent is not None:
                return because(silent, error)
        return error

    async def _silent(self) -> GymServerDied | None:
        import asyncio

        loop = asyncio.get_running_loop()
        lock = self._asking.setdefault(loop, asyncio.Lock())
        async with lock:
            if time.monotonic() - self._asked_at > _FRESH_S:
                try:
                    await asyncio.to_thread(self._gym.health, _PROBE_S)
                    self._last = None
                except GymServerDied as error:
                    self._last = error
                except GymError:
                    self._last = None
                self._asked_at = time.monotonic()
            return self._last


def because(reason: GymError, error: GymError) -> GymError:
    """``reason``, said of the rollout that failed with ``error``, with its attempts and seconds."""
    said = "" if isinstance(error, GymStopped) else f": {error.problem}"
    explained = reason.with_details(
        f"{reason.problem}; the rollout at {error.component or error.address}{said or ' was ended'}",
        attempts=error.attempts,
        elapsed_s=error.elapsed_s,
    )
    explained.__cause__ = error
    return explained
