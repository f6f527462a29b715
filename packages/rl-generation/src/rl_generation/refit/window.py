"""Buckets that are loaded at the same time, as far as their window allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from .contract import Bucket


class LoadingWindow:
    """The scope of all loads of one refit; at its end none goes on.

    An engine gets a bucket while it still loads the one before, so that it never waits for the next call.
    When the scope ends by an exception, loads that were begun are waited for, each having a deadline of its
    own; when it is cancelled, so are they.
    """

    def __init__(self) -> None:
        self._begun: deque[asyncio.Task[Any]] = deque()

    async def load(self, bucket: Bucket, work: Coroutine[Any, Any, Any]) -> None:
        """Begin to load; return when the source may be asked for the next bucket.

        Args:
            bucket: whose window counts.
            work: loads it, with a deadline.

        Raises:
            Exception: what the load of a bucket raised that had to be loaded by now.
        """
        self._begun.append(asyncio.ensure_future(work))
        # It begins before the source does anything.
        await asyncio.sleep(0)
        while len(self._begun) >= bucket.window or (self._begun and self._begun[0].done()):
            await self._first()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all loads.

        Raises:
            Exception: the first that one of them raised, if the scope ends without one.
        """
        try:
            while self._begun and kind is None:
                await self._first()
        except asyncio.CancelledError:
            kind = asyncio.CancelledError
            raise
        finally:
            if kind is not None and not issubclass(kind, Exception):
                for task in self._begun:
                    task.cancel()
            await asyncio.gather(*self._begun, return_exceptions=True)
            self._begun.clear()

    async def _first(self) -> None:
        # Kept among the begun until it has ended: it may be cancelled while it is waited for.
        task = self._begun[0]
        await asyncio.wait([task])
        self._begun.popleft()
        await task
