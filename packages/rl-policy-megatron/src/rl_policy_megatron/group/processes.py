"""Processes of this machine by number and time of birth, and all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """One process, and no other that gets its number later. It leads a process group of its own.

    Attributes:
        machine: names the machine, or the part of it whose processes have numbers of their own.
        pid: its number.
        born: its start in ticks since the machine's, or 0 where that is not known.
    """

    machine: str
    pid: int
    born: int

    @classmethod
    def settle(cls) -> ProcessPlace:
        """This process, after it has become the leader of a process group of its own.

        Its children are in that group and can be found by it, also when this process has died.
        """
        if os.getpgrp() != os.getpid():
            os.setpgrp()
        return cls(this_machine(), os.getpid(), _stat(os.getpid())[2])

    @property
    def here(self) -> bool:
        """Whether it is, or was, on this machine and can be looked at."""
        return bool(self.born) and self.machine == this_machine()

    @property
    def died(self) -> bool:
        """Whether it is known to have ended; never true of another machine's."""
        if not self.here:
            return False
        state, _, born = _stat(self.pid)
        return born != self.born or state in "ZX"

    def left(self) -> list[int]:
        """Numbers of the running processes of its group, itself included; empty on another machine."""
        if not self.here:
            return []
        born_now = _stat(self.pid)[2]
        if born_now not in (0, self.born):
            # Its number was given again, which happens only when its whole group is gone.
            return []
        found: list[int] = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                pid = int(entry)
                state, group, born = _stat(pid)
                # While a process ends, the kernel no longer tells its group.
                if self.pid in (pid, group) and born >= self.born and state not in "ZX":
                    found.append(pid)
        return found


def end_all(places: Sequence[ProcessPlace], timeout_s: float) -> list[int]:
    """SIGKILL the processes and everything in their groups, and wait until they are gone.

    Returns:
        Numbers of those that still run after ``timeout_s``; normally none.
    """
    deadline = time.monotonic() + timeout_s
    while left := [pid for place in places for pid in place.left()]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    return left


def this_machine() -> str:
    """Names this machine, or the part of it whose processes have numbers of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Nothing is known about its processes then.
        return f"unknown {os.getpid()}"


def _stat(pid: int) -> tuple[str, int, int]:
    """State, process group and time of birth; ``X`` and 0 if there is no such process, or no ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name, in parentheses, may hold anything.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", 0, 0
    return fields[0], int(fields[2]), int(fields[19])
