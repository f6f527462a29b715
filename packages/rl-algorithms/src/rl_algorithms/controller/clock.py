"""Time as a controller sees it: never back, and without the time in which its process did not run."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TimerKind = Literal["retry", "rollout", "straggler", "groups", "stall"]

# It wants to be looked at so often, and takes a much longer silence for one in which nobody could look.
_HEARTBEAT_S = 10.0
_LATE_S = 5.0
# A clock on the wall that counts from long ago has no more digits than this.
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True, order=True)
class Timer:
    """Something to look at when the time has come; whether it still matters is its owner's to know."""

    due: float
    serial: int
    kind: TimerKind
    position: int = -1
    index: int = -1
    number: int = -1


class ControllerClock:
    """The present, and the timers.

    A machine that was suspended, or a process that was stopped, finds all its deadlines passed at once
    although nobody had the time to keep them. So of a long silence only a heartbeat counts.

    Attributes:
        now: seconds; starts at 0.
        overslept: seconds that were taken out.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.overslept = 0.0
        self._seen: float | None = None
        self._timers: list[Timer] = []
        self._serial = 0

    def advance(self, outside: float) -> None:
        """The clock on the wall shows ``outside`` now; if it was set back, time goes on from here."""
        passed = 0.0 if self._seen is None else max(0.0, outside - self._seen)
        self._seen = outside
        if passed > _HEARTBEAT_S + _LATE_S:
            self.overslept += passed - _HEARTBEAT_S
            passed = _HEARTBEAT_S
        self.now += passed

    def has_come(self, moment: float) -> bool:
        return moment <= self.now + _ROUNDING_S

    def arm(
        self, after_s: float, kind: TimerKind, position: int = -1, index: int = -1, number: int = -1
    ) -> None:
        self._serial += 1
        heapq.heappush(self._timers, Timer(self.now + after_s, self._serial, kind, position, index, number))

    def due(self) -> Iterator[Timer]:
        """Timers whose time has come, each once."""
        while self._timers and self.has_come(self._timers[0].due):
            yield heapq.heappop(self._timers)

    @property
    def next_due(self) -> float:
        """When to look again at the latest, by the clock on the wall."""
        ahead = self._timers[0].due - self.now if self._timers else _HEARTBEAT_S
        return (self._seen or 0.0) + min(max(ahead, 0.0), _HEARTBEAT_S)
