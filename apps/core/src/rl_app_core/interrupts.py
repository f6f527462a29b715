"""Ctrl-C asks a run to stop at the next safe point; a second one stops it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
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


class StopRequest:
    """Catches SIGINT and SIGTERM inside its block and remembers that the run should stop.

    The second signal raises :class:`Interrupted` there and then.

    Args:
        on_request: told the signal's name once, at the first signal.
    """

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self._on_request = on_request
        self._previous: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise Interrupted(number, "stopped at once")
        self.signal_number = number
        self._on_request(signal.Signals(number).name)
