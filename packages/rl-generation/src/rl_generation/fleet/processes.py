"""Processes of this machine by number and time of birth, so that a number that was given again is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass

_LOOK_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, and no other that gets its number later.

    Attributes:
        pid: its number.
        born: its start in ticks since the machine's, or 0 where that is not known.
    """

    pid: int
    born: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Of a process that runs now."""
        return cls(pid, _born(pid)[1])

    @property
    def runs(self) -> bool:
        """Whether it is there and no zombie."""
        if not self.born:
            return False
        state, born = _born(self.pid)
        return born == self.born and state not in "ZX"

    async def gone_within(self, timeout_s: float) -> bool:
        """Wait for its end; whether that came in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.runs:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    def kill(self) -> None:
        """SIGKILL it if it still is what it was."""
        if self.runs:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def _born(pid: int) -> tuple[str, int]:
    """State and time of birth; ``X`` and 0 if there is no such process, or no ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name, in parentheses, may hold anything.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])
