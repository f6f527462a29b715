"""Who may start now: first come, first served, up to a limit."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Admission:
    """A limit on what runs at the same time, on one event loop. Used with ``async with``, or
    by :meth:`enter` and :meth:`leave`.

    A place that becomes free goes to whoever has waited longest, never to a newcomer; whoever is cancelled
    while waiting passes a place that was just given to it on. Each step costs the same however many wait.

    Args:
        limit: at most so many at a time, ≥ 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit} lets nothing run")
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, within_s: float | None = None) -> None:
        """Wait for a place, which :meth:`leave` gives back.

        Args:
            within_s: how long to wait for it; ``None`` waits as long as it takes.

        Raises:
            TimeoutError: there was none in time.
        """
        import asyncio

        # A free place means that nobody waits: whoever leaves hands the place over before it counts as free.
        if self._free:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        timer = None if within_s is None else loop.call_later(within_s, _expire, place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._pass_on()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def leave(self) -> None:
        """Give a place back."""
        self._pass_on()

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


def _expire(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_exception(TimeoutError())
