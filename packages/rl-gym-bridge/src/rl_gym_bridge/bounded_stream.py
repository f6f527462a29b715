"""An asynchronous stream of somebody else's, read without ever waiting longer than one wants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class StreamEnded(Exception):
    """The stream has nothing more to give."""


class StreamTimeout(Exception):
    """The stream gave nothing in time."""


class BoundedStream(Generic[_T]):
    """Reads ``stream`` item by item.

    A stream that ignores its cancellation is abandoned after ``close_s`` seconds: nothing here waits for it.
    """

    def __init__(self, stream: AsyncIterator[_T], *, close_s: float) -> None:
        self._stream = stream
        self._close_s = close_s
        self._next: asyncio.Task[_T] | None = None

    async def next(self, timeout_s: float) -> _T:
        """The next item.

        Raises:
            StreamEnded: there is none.
            StreamTimeout: there was none within ``timeout_s`` seconds; the stream can then only be closed.
        """
        task = self._next = asyncio.ensure_future(self._read())
        done, _ = await asyncio.wait({task}, timeout=max(0.0, timeout_s))
        if not done:
            raise StreamTimeout
        self._next = None
        return task.result()

    async def close(self) -> None:
        """End the stream and whatever it runs; an error in that is logged, so as not to hide the first."""
        if self._next is not None:
            self._next.cancel()
            await self._settle(self._next, "stop its current wait")
        closing = getattr(self._stream, "aclose", None)
        if closing is not None:
            await self._settle(asyncio.ensure_future(_awaited(closing())), "close")

    async def _read(self) -> _T:
        # A task may not end with StopAsyncIteration, so the end gets a name of its own.
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            raise StreamEnded from None

    async def _settle(self, task: asyncio.Task[object], what: str) -> None:
        done, _ = await asyncio.wait({task}, timeout=self._close_s)
        if not done:
            task.cancel()
            _log.warning("%s did not %s within %.0f s", type(self._stream).__name__, what, self._close_s)
        elif not task.cancelled() and task.exception() is not None and what == "close":
            _log.warning("%s failed to close", type(self._stream).__name__, exc_info=task.exception())


async def _awaited(closing: object) -> None:
    await closing  # type: ignore[misc]
