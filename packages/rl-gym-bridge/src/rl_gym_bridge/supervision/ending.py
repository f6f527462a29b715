"""Ends a set of processes within a deadline, those included that they start meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from .processes import Process, send

_PAUSE_S = 0.02


def end_all(
    find: Callable[[], list[Process]],
    reap: Callable[[], None],
    *,
    polite_s: float,
    total_s: float,
) -> list[Process]:
    """SIGTERM, then SIGKILL, until ``find`` finds nothing.

    Args:
        find: the processes that must go, zombies included.
        reap: collects the exit of those that are children of the caller.
        polite_s: seconds between SIGTERM and SIGKILL; 0 leaves SIGTERM out.
        total_s: seconds for everything.

    Returns:
        What was still there at the deadline.
    """
    began = time.monotonic()
    asked: set[tuple[int, int]] = set()
    while True:
        reap()
        left = find()
        if not left:
            return []
        elapsed = time.monotonic() - began
        if elapsed >= total_s:
            return left
        for entry in left:
            if not entry.runs:
                continue
            identity = (entry.pid, entry.started)
            if elapsed >= polite_s:
                send(entry, signal.SIGKILL)
            elif identity not in asked:
                asked.add(identity)
                send(entry, signal.SIGTERM)
                # A stopped process sees no signal but SIGKILL until it goes on.
                if entry.state in "Tt":
                    send(entry, signal.SIGCONT)
        time.sleep(_PAUSE_S)
