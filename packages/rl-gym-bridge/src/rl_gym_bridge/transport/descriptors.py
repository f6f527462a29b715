"""How many connections the limit on open files leaves room for."""

from __future__ import annotations

import logging
import os

from ..failures import GymConfigError

LOG = logging.getLogger(__name__)
#: Left for everything else that the process opens.
RESERVE = 64


def affordable_connections(wanted: int) -> int:
    """Return ``wanted``, or as many as this process may still open, with a warning.

    Raises:
        GymConfigError: there is room for none, or ``wanted`` is below 1.
    """
    import resource

    if wanted < 1:
        raise GymConfigError(f"{wanted} is below 1", component="max_concurrency")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = soft - _open_files() - RESERVE
    if wanted <= room:
        return wanted
    allowed = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    remedy = f"raise it with `ulimit -n {wanted + soft - room}` (the hard limit is {allowed})"
    if room < 1:
        raise GymConfigError(
            f"the limit of {soft} open files leaves no room for connections",
            component="max_concurrency",
            remedy=remedy,
        )
    LOG.warning(
        "max_concurrency=%d is lowered to %d, because this process may open only %d files; %s",
        wanted,
        room,
        soft,
        remedy,
    )
    return room


def _open_files() -> int:
    """Open files of this process, where the system tells; else none."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
