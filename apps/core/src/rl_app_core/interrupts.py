"""Ctrl-C asks a run to stop at the next safe point; a second one stops it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType, TracebackType


class Interrupted(BaseException):
    """The run stopped because it was asked to; it can be resumed.

    Like KeyboardInterrupt it is no Exception: nobody who handles a failure may take it for one.

    Attributes:
        signal_number: which signal asked.
    """

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


@contextlib.contextmanager
def terminable() -> Generator[None]:
    """Let SIGTERM end the block as Ctrl-C does, by an exception that everything open is closed with.

    Left alone it would end the process without a word. Outside the main thread it does nothing.

    Raises:
        Interrupted: the signal came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise Interrupted(number, "interrupted")

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except Exception as error:
        # Code that calls back from C has turned it into something else.
        if came:
            raise Interrupted(came[0], "interrupted") from error
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def handlers_kept() -> Generator[None]:
    """The scope in which a library installs handlers for signals, which are not wanted afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


class StopRequest:
    """Catches SIGINT and SIGTERM inside its block and remembers that the run should stop.

    The second signal ends the block there and then, with :class:`Interrupted` whatever becomes of the
    KeyboardInterrupt on its way: code that calls back from C may turn it into something else.

    Args:
        on_request: told the signal's name once, at the first signal.
    """

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self._on_request = on_request
        self._previous: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}
        self._insisted = False
        self.signal_number: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal_number is not None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._insisted and error is not None and self.signal_number is not None:
            raise Interrupted(self.signal_number, "stopped at once") from error

    def interrupted(self, what: str) -> Interrupted:
        """The exception for a run that has stopped as it was asked to; ``what`` says where."""
        assert self.signal_number is not None
        return Interrupted(self.signal_number, what)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._insisted = True
            raise KeyboardInterrupt
        self.signal_number = number
        self._on_request(signal.Signals(number).name)
