"""Waiting for an engine's answer, for its deadline and for its death at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..failures import DeadlineError, GenerationError
from .faults import converted

T = TypeVar("T")


class Trouble:
    """Something that may go wrong once and then holds until it is cleared. All on one event loop."""

    def __init__(self) -> None:
        self._kind: type[GenerationError] = GenerationError
        self._message = ""
        self._came: asyncio.Event = asyncio.Event()

    @property
    def here(self) -> bool:
        """Whether it went wrong."""
        return self._came.is_set()

    def report(self, kind: type[GenerationError], message: str) -> None:
        """It went wrong; of several reasons the first is kept."""
        if not self.here:
            self._kind, self._message = kind, message
            self._came.set()

    def clear(self) -> None:
        """It is well again."""
        self._came.clear()

    async def wait(self) -> None:
        """Returns when it goes wrong."""
        await self._came.wait()

    def error(self) -> GenerationError:
        """An exception for whoever is concerned, a new one each time."""
        return self._kind(self._message)

    def raise_if_here(self) -> None:
        """Raise :meth:`error` if it went wrong."""
        if self.here:
            raise self.error()


async def guarded(
    work: Coroutine[Any, Any, T],
    troubles: tuple[Trouble, ...],
    *,
    component: str,
    what: str,
    timeout_s: float,
) -> T:
    """The result of ``work``, unless one of ``troubles`` or the deadline comes first; then it is cancelled.

    Raises:
        DeadlineError: no result within ``timeout_s``.
        GenerationError: a trouble's, or the one that stands for what ``work`` raised.
    """
    for trouble in troubles:
        if trouble.here:
            work.close()
            raise trouble.error()
    task = asyncio.ensure_future(work)
    alarms = [asyncio.ensure_future(trouble.wait()) for trouble in troubles]
    try:
        await asyncio.wait([task, *alarms], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for trouble in troubles:
            # Also where vLLM noticed first: its words say less.
            trouble.raise_if_here()
        if task.done():
            try:
                return task.result()
            except Exception as error:
                raise converted(error, component, what) from error
        raise DeadlineError(f"{component}: {what} did not end within {timeout_s:g} s")
    finally:
        for alarm in alarms:
            alarm.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=1.0)
