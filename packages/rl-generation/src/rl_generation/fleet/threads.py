"""Between threads and event loops: a loop in a thread of its own, and blocking calls beside a loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..failures import DeadlineError, GenerationError

T = TypeVar("T")


async def in_thread(work: Callable[[], T], what: str, timeout_s: float) -> T:
    """Run something that blocks in a thread made for it, so that the loop goes on.

    The thread is a daemon: what never returns keeps neither the caller nor the end of the process waiting.

    Raises:
        DeadlineError: no result within ``timeout_s``; the thread is left to itself.
        Exception: what ``work`` raises.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        problem: BaseException | None = None
        try:
            value = work()
        except BaseException as error:
            problem = error
        if isinstance(problem, StopIteration):
            # A future refuses it.
            problem = RuntimeError("StopIteration")
        try:
            loop.call_soon_threadsafe(settle, value, problem)
        except RuntimeError:
            # The loop has ended, and nobody waits.
            return

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        done, _ = await asyncio.wait((result,), timeout=timeout_s)
    except asyncio.CancelledError:
        # Otherwise a failure that comes later is reported as one that nobody looked at.
        result.cancel()
        raise
    if not done:
        result.cancel()
        raise DeadlineError(f"{what} did not end within {timeout_s:.3g} s")
    return result.result()


class LoopThread:
    """An event loop that runs in a daemon thread until it is closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closing = threading.Lock()
        self._closed = False
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def time(self) -> float:
        """The loop's clock, in seconds."""
        return self._loop.time()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start something on the loop, from any thread.

        Raises:
            GenerationError: the loop has ended.
        """
        with self._closing:
            # What is handed over before the loop is told to stop still runs there, if only to be cancelled.
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise GenerationError(f"{self._name}: used after shutdown(); build a new one")

    def call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Run something on the loop and wait for it, from any other thread.

        Raises:
            DeadlineError: no result within ``timeout_s``; the work is cancelled.
            GenerationError: called on the loop itself, which would wait for itself, or after its end.
            Exception: what the work raises.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise GenerationError(f"{self._name}: {what} was called on its own event loop; await it instead")
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(f"{self._name}: {what} did not end within {timeout_s:.3g} s") from error
        except BaseException:
            # An interrupt of the waiting thread; the work may go on otherwise.
            future.cancel()
            raise

    def close(self, timeout_s: float) -> None:
        """Cancel what runs and end the thread, or leave it after ``timeout_s``; idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        finally:
            self._loop.close()
