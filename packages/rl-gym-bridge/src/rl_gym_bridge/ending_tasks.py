"""Ends tasks of an event loop, also those below which a cancellation gets lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

#: Seconds after which a task that goes on is cancelled again. Closing a connection takes less.
_AGAIN_S = 1.0


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all of them have ended.

    Once is not always enough: before Python 3.11 a timeout inside (that between two attempts to connect, say)
    which passes in the same moment takes the cancellation for its own, and the task goes on.
    """
    import asyncio

    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
