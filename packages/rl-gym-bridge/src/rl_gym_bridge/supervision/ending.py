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

    Raises:
        OSError: until the deadline nothing could be told.
    """
    began = time.monotonic()
    asked: set[tuple[int, int]] = set()
    while True:
        reap()
        elapsed = time.monotonic() - began
        try:
            left = find()
            if not left or elapsed >= total_s:
                return left
            for entry in left:
                if entry.runs:
                    _end(entry, asked, kill=elapsed >= polite_s)
        except OSError:
            # The machine may be out of file descriptors for a moment.
            if elapsed >= total_s:
                raise
        time.sleep(_PAUSE_S)


def _end(entry: Process, asked: set[tuple[int, int]], *, kill: bool) -> None:
    identity = (entry.pid, entry.started)
    if kill:
        send(entry, signal.SIGKILL)
    elif identity not in asked:
        send(entry, signal.SIGTERM)
        # A stopped process sees no signal but SIGKILL until it goes on.
        if entry.state in "Tt":
            send(entry, signal.SIGCONT)
        asked.add(identity)
