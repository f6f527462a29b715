"""Linux processes: who they are, whose children they are, and signals that cannot hit a stranger.

A process id alone is reused by the kernel; together with the time at which the process started it is not.
Only the kernel's word that there is no such process counts as its end: every other error, such as the lack of
a file descriptor, says nothing about it and comes out as an :class:`OSError`.
Everything here reads ``/proc`` and needs the standard library only: the guardian runs without any package.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from typing import NamedTuple

RUN_ID_VARIABLE = "RL_GYM_RUN_ID"


class Process(NamedTuple):
    """One process as ``/proc/PID/stat`` shows it.

    Attributes:
        pid: process id.
        parent: process id of the parent.
        session: id of its Unix session.
        state: ``R``, ``S``, ``D``, ``T``, ``Z``, …
        started: clock ticks between the machine's boot and its start.
    """

    pid: int
    parent: int
    session: int
    state: str
    started: int

    @property
    def runs(self) -> bool:
        """Whether it is more than an entry that nobody reaped yet."""
        return self.state not in "ZX"


def process(pid: int) -> Process | None:
    """The process with this id, ``None`` if there is none.

    Raises:
        OSError: that cannot be told.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in brackets, and may itself contain spaces and brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), chr(fields[0][0]), int(fields[19]))


def all_processes() -> list[Process]:
    """Every process that this one can see.

    Raises:
        OSError: they cannot be listed or looked at.
    """
    found = []
    for name in os.listdir("/proc"):
        # Where /proc hides them, processes of other users are none of this one's business.
        with contextlib.suppress(PermissionError):
            entry = process(int(name)) if name.isdigit() else None
            if entry is not None:
                found.append(entry)
    return found


def is_same(entry: Process) -> bool:
    """Whether the process still runs, and its id was not given to another.

    Raises:
        OSError: that cannot be told.
    """
    now = process(entry.pid)
    return now is not None and now.runs and now.started == entry.started


def descendants(root: int, among: Iterable[Process] | None = None) -> list[Process]:
    """Children of ``root``, their children and so on, without ``root``."""
    children: dict[int, list[Process]] = {}
    for entry in all_processes() if among is None else among:
        children.setdefault(entry.parent, []).append(entry)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [entry.pid for entry in below]
    return found


def carries_run_id(pid: int, run_id: str) -> bool:
    """Whether the process was started with ``RL_GYM_RUN_ID=run_id`` in its environment.

    Raises:
        OSError: that cannot be told.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # Gone, or another user's.
        return False
    return f"{RUN_ID_VARIABLE}={run_id}".encode() in environment.split(b"\0")


def of_run(run_id: str) -> list[Process]:
    """The processes of a run, whoever their parent is now.

    Those are the ones that carry the run's id, everything below them, and everything in their sessions,
    all the run's own: a program that gives itself a title overwrites its environment, and one whose
    parent died has another parent. This process and those above it are never among them.

    Raises:
        OSError: that cannot be told.
    """
    everyone = all_processes()
    spared = _self_and_above(everyone)
    found = {entry.pid: entry for entry in everyone if carries_run_id(entry.pid, run_id)}
    while True:
        sessions = {entry.session for entry in found.values()} - {os.getsid(0)}
        more = [entry for pid in found for entry in descendants(pid, everyone)]
        more += [entry for entry in everyone if entry.session in sessions]
        new = {entry.pid: entry for entry in more if entry.pid not in found}
        if not new:
            return [entry for entry in found.values() if entry.pid not in spared]
        found.update(new)


def _self_and_above(everyone: Iterable[Process]) -> set[int]:
    parents = {entry.pid: entry.parent for entry in everyone}
    line = {os.getpid()}
    above = parents.get(os.getpid(), 0)
    while above and above not in line:
        line.add(above)
        above = parents.get(above, 0)
    return line


def send(entry: Process, number: int) -> bool:
    """Signal exactly this process; returns whether it was still there.

    Raises:
        OSError: that cannot be told.
    """
    open_pidfd = getattr(os, "pidfd_open", None)
    descriptor = -1
    if open_pidfd is not None:
        try:
            descriptor = open_pidfd(entry.pid)
        except ProcessLookupError:
            return False
        except OSError:
            # A kernel or sandbox without pidfd: the check below still leaves only microseconds.
            descriptor = -1
    try:
        if not is_same(entry):
            return False
        try:
            if descriptor >= 0:
                signal.pidfd_send_signal(descriptor, number)
            else:
                os.kill(entry.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def reap_children(pids: Iterable[int]) -> None:
    """Collect the exit of those of the processes that are children of this one and have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
