"""Work that goes on while the caller does something else, and is waited for with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..failures import RefitError

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a thread of that name, which never keeps the interpreter from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def result_of(future: Future[T], timeout_s: float, what: str) -> T:
    """What the work returned, or raised.

    Raises:
        RefitError: it did not end within the deadline.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        if future.done():
            raise
        raise RefitError(f"refit: {what} did not end within {timeout_s:g} s") from error
