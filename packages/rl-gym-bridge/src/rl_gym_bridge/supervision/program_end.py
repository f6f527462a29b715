"""Ends what still runs when this program ends by itself."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

_LOG = logging.getLogger(__name__)


class Endable(Protocol):
    """Something that runs beyond this process."""

    def ask_shutdown(self) -> None:
        """Begin to shut down and return at once."""

    def shutdown(self) -> None:
        """Shut down, and wait for that."""


_LIVE: weakref.WeakSet[Endable] = weakref.WeakSet()


def end_with_program(running: Endable) -> None:
    """Shut it down at the end of the program, if it still exists then."""
    if not _LIVE:
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _LIVE.add(running)


def has_ended(running: Endable) -> None:
    """Nothing is left to shut down."""
    _LIVE.discard(running)


def end_quietly(running: Endable) -> None:
    """Shut down where another error is already on its way, or nobody is left to take one."""
    try:
        running.shutdown()
    except Exception as error:
        _LOG.warning("while Gym was shut down: %s", error)


def _end_all() -> None:
    for each in list(_LIVE):
        each.ask_shutdown()
    for each in list(_LIVE):
        end_quietly(each)
