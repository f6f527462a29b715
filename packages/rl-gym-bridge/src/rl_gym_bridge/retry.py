"""How often, how long and with which pauses a failed request is tried again."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Statuses after which nothing of the request runs any more, and another attempt may fare better.
REPEATED_STATUSES = frozenset({425, 429, 500, 502, 503})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on the attempts of one rollout.

    Repeated is what a server refused before it began (no connection, 425, 429, 503), and what it began and
    then said had ended (500, 502): **a repeated 500 executes a rollout anew, beside whatever the first
    execution did to the world before it ended**. Not repeated is what may still run: 408, 504, a deadline
    of ours that passed, a connection that broke. Not repeated is what would end the same way: every other
    status, and a 500 with which Gym passes on that an inner server refused the request itself.

    Attributes:
        infra_attempts: attempts in total, the first included, while faults are INFRA.
        data_attempts: attempts in total while faults are DATA. Who dispatches rows again applies it; a single
            request is not repeated for a DATA fault.
        base_s: pause before the second attempt; it doubles with each further one.
        cap_s: the longest pause.
        elapsed_s: no further attempt starts this many seconds after the first one did, whatever it waits for.
    """

    infra_attempts: int = 5
    data_attempts: int = 2
    base_s: float = 1.0
    cap_s: float = 30.0
    elapsed_s: float = 600.0

    def __post_init__(self) -> None:
        if self.infra_attempts < 1 or self.data_attempts < 1:
            raise ValueError(
                f"attempts count the first one too: infra_attempts={self.infra_attempts} and "
                f"data_attempts={self.data_attempts} must be at least 1"
            )
        if not 0 < self.base_s <= self.cap_s:
            raise ValueError(f"base_s={self.base_s} must be above 0 and at most cap_s={self.cap_s}")
        if not self.elapsed_s >= 0:
            raise ValueError(f"elapsed_s={self.elapsed_s} must be at least 0")

    def pause_s(self, attempt: int, rng: random.Random, *, asked_s: float = 0.0) -> float:
        """Seconds to wait after failed attempt ``attempt`` (from 1): doubling, capped, 50–100 % at random.

        A server that asks for a longer pause (``asked_s``) gets it, up to the cap.
        """
        longest = min(self.cap_s, self.base_s * 2 ** min(attempt - 1, 60))
        return max(longest * (0.5 + 0.5 * rng.random()), min(asked_s, self.cap_s))


def retry_after_s(header: str, *, now: float) -> float:
    """Seconds that a ``Retry-After`` header asks for, a number or a date; 0 if it is empty, past or neither.

    Args:
        header: its value.
        now: seconds since the epoch.
    """
    text = header.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, TypeError, OverflowError, IndexError):
        return 0.0
