"""A bound on everything that happens in a block."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import asyncio


class Deadline:
    """Ends the block of a ``with`` statement inside a task after ``seconds``, with ``TimeoutError``.

    What ``asyncio.timeout`` does from Python 3.11 on. A cancellation from outside stays one, except on Python
    3.10 when it comes in the very moment in which the deadline passes.

    Attributes:
        elapsed_s: seconds since the block began.
    """

    __slots__ = ("_cancelling", "_handle", "_passed", "_seconds", "_started", "_task")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._passed = False
        self._started = 0.0
        self._cancelling = 0
        self._task: asyncio.Task[object] | None = None
        self._handle: asyncio.TimerHandle | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> Deadline:
        import asyncio

        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task to end")
        self._task = task
        self._started = time.monotonic()
        # Tasks count their cancellations from Python 3.11 on.
        if hasattr(task, "cancelling"):
            self._cancelling = task.cancelling()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._pass)
        return self

    def _pass(self) -> None:
        self._passed = True
        assert self._task is not None
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        import asyncio

        task, self._task = self._task, None
        assert self._handle is not None
        self._handle.cancel()
        if not self._passed or task is None:
            return False
        only_ours = not hasattr(task, "uncancel") or task.uncancel() <= self._cancelling
        if only_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError(f"not finished within {self._seconds:g} s") from error
        return False
