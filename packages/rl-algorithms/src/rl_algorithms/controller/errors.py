"""What a controller ends a run with."""

from __future__ import annotations


class ControllerError(RuntimeError):
    """An event that cannot have happened, or a part that broke its contract: the run must not go on."""


class StalledError(ControllerError):
    """Nothing has happened for longer than ``stall_timeout_s``; says what everything waits for."""
