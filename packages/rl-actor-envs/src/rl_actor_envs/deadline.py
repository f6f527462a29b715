"""How long the building of one environment, and the waiting for another process's, may take."""

from __future__ import annotations

import os
import time

from .errors import ActorEnvironmentError

TIMEOUT_VARIABLE = "RL_ACTOR_ENVS_BUILD_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 3600.0


def build_timeout_s() -> float:
    """Seconds, from ``RL_ACTOR_ENVS_BUILD_TIMEOUT_S``; 3600 when that is unset or empty.

    Raises:
        ActorEnvironmentError: it is not a positive, finite number.
    """
    value = os.environ.get(TIMEOUT_VARIABLE)
    if not value:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ActorEnvironmentError(
            f"{TIMEOUT_VARIABLE} is {value!r}; set it to seconds above 0, or unset it"
        )
    return seconds


class Deadline:
    """A point in time, so many seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Seconds until it, not below 0."""
        return max(0.0, self.seconds - self.elapsed_s)
