"""Failures in the log: the first at once, then one line per address and interval."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG = logging.getLogger(__name__)


class FailureLog:
    """Warns about failures without flooding the log.

    Args:
        interval_s: seconds between two lines about the same address.
        clock: seconds that only grow.
    """

    def __init__(self, *, interval_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def tell(self, address: str, message: str) -> None:
        """Log ``message`` about ``address``, or count it for the next line."""
        now = self._clock()
        last = self._last.get(address)
        if last is not None and now - last < self._interval_s:
            self._unsaid[address] = self._unsaid.get(address, 0) + 1
            return
        unsaid = self._unsaid.pop(address, 0)
        self._last[address] = now
        LOG.warning("%s%s", message, f" ({unsaid} more at {address} since the last line)" if unsaid else "")
