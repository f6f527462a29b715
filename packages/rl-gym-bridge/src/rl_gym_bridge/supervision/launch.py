"""The trainer's side of the guardian: start one, ask about Gym's command, have everything ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

from .channel import Channel, send_message
from .ending import end_all
from .processes import Process, descendants, of_run, process, reap_children, send

# The guardian imports the standard library and its own package, whose folder comes last on the path, so that
# nothing beside it can replace a module of Python's.
_BOOT = """\
import sys
sys.path.append(sys.argv[1])
from rl_gym_bridge.supervision.guardian import main
sys.exit(main())
"""
_STARTED_S = 20.0
# What the guardian may take beyond the time that it was given.
_MARGIN_S = 2.0


class GuardianFailed(RuntimeError):
    """The guardian did not start the command; says why."""


class GuardedCommand:
    """A command and everything that comes of it, all of which ends with this process.

    Attributes:
        run_id: found in the environment of every process of it.
        command_pid: process id of the command, and of its Unix session.
        exit_status: of the command once it ended: its exit code, or minus the signal that killed it.
        survivors: processes that could not be ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        run_id: str,
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
        remove: Sequence[Path],
        shutdown_timeout_s: float,
    ) -> None:
        """Start it.

        Args:
            command: program and arguments; no shell is involved.
            run_id: must be in ``environment`` as ``RL_GYM_RUN_ID``.
            folder: working folder.
            environment: the whole environment.
            log: takes both output streams.
            remove: files and folders that are deleted when everything has ended.
            shutdown_timeout_s: how long ending may take when nobody says otherwise.

        Raises:
            GuardianFailed: the guardian or the command cannot be started.
        """
        self.run_id = run_id
        self.command_pid = 0
        self.exit_status: int | None = None
        self.survivors: list[int] = []
        self._ended = False
        self._problem = ""
        self._lock = threading.RLock()
        # Of its own, so that whoever ends it can be told to hurry.
        self._orders_lock = threading.Lock()
        self._known: dict[int, Process] = {}
        self._guardian: subprocess.Popen[bytes] | None = None
        own = process(os.getpid())
        if own is None:
            raise GuardianFailed("/proc does not show this process")
        complaints = log.with_name("guardian.log")
        # Both pipes exist first: wherever this is interrupted, the guardian sees its pipe close.
        orders_for_guardian, self._orders = _pipe()
        self._answers, answers_of_guardian = _pipe()
        self._reports = Channel(self._answers.fileno())
        try:
            with orders_for_guardian, answers_of_guardian, open(complaints, "ab") as stderr:
                os.chmod(complaints, 0o600)
                self._guardian = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parents[2])],
                    stdin=orders_for_guardian,
                    stdout=answers_of_guardian,
                    stderr=stderr,
                    cwd=folder,
                    env=dict(environment),
                    start_new_session=True,
                )
            send_message(
                self._orders.fileno(),
                {
                    "trainer": [own.pid, own.started],
                    "command": list(command),
                    "folder": str(folder),
                    "log": str(log),
                    "remove": [str(path) for path in remove],
                    "shutdown_timeout_s": shutdown_timeout_s,
                },
            )
            self._await_start(complaints)
        except BaseException:
            self._close_orders()
            self.end(2.0)
            raise

    def _await_start(self, complaints: Path) -> None:
        deadline = time.monotonic() + _STARTED_S
        while not self.command_pid:
            self._read(deadline - time.monotonic())
            if self._problem:
                raise GuardianFailed(self._problem)
            if not self.command_pid and (self._reports.closed or time.monotonic() > deadline):
                said = complaints.read_text(errors="replace").strip()[-500:]
                status = None if self._guardian is None else self._guardian.poll()
                raise GuardianFailed(f"the guardian did not report a start (exit status {status}): {said}")

    def _read(self, timeout_s: float) -> None:
        for message in self._reports.read(timeout_s):
            if message["event"] == "started":
                self.command_pid = int(message["pid"])
            elif message["event"] == "failed":
                self._problem = str(message["problem"])
            elif message["event"] == "exited":
                self.exit_status = int(message["status"])
            elif message["event"] == "ended":
                self._ended = True
                self.survivors = [int(pid) for pid in message["survivors"]]

    def problem(self) -> str:
        """Why the command no longer runs, empty while it does; costs microseconds."""
        with self._lock:
            self._read(0.0)
            watch_status = None if self._guardian is None else self._guardian.poll()
            if self.exit_status is not None:
                return f"the command ended with {described_status(self.exit_status)}"
            if self._ended:
                return "it was ended"
            if self._reports.closed:
                return "its guardian was killed"
            if watch_status is not None:
                return f"its guardian's watch ended with {described_status(watch_status)}"
            return ""

    def ask_end(self, seconds: float) -> None:
        """Have everything ended within ``seconds``, and return at once; the shortest time asked for holds."""
        with self._orders_lock, contextlib.suppress(ValueError):
            send_message(self._orders.fileno(), {"stop_s": seconds})

    def _close_orders(self) -> None:
        with self._orders_lock:
            self._orders.close()

    def end(self, seconds: float) -> list[Process]:
        """End everything within ``seconds`` and a margin; returns what survived. May be called again.

        Raises:
            OSError: this process cannot see what is left, for want of file descriptors.
        """
        self.ask_end(seconds)
        with self._lock:
            guardian = self._guardian
            deadline = time.monotonic() + seconds + _MARGIN_S
            if guardian is not None:
                while not self._reports.closed and time.monotonic() < deadline:
                    self._read(min(0.5, deadline - time.monotonic()))
                _wait(guardian, max(0.1, min(_MARGIN_S, deadline - time.monotonic())))
            try:
                left = self._end_what_is_left(max(_MARGIN_S, deadline - time.monotonic()))
                # What was killed holds nothing any more, whenever its new parent collects its exit.
                return [entry for entry in left if entry.runs]
            except OSError:
                # The guardian saw for itself that nothing is left.
                if not self._ended or self.survivors:
                    raise
                return []
            finally:
                if guardian is not None:
                    _wait(guardian, _MARGIN_S)
                self._close_orders()
                self._reports.closed = True
                self._answers.close()

    def _end_what_is_left(self, seconds: float) -> list[Process]:
        """Do the guardian's work where it was killed itself, stopped, or hangs."""
        guardian = self._guardian
        if guardian is not None and guardian.poll() is None:
            # The tree below it is lost from sight once it is gone.
            self._known.update({entry.pid: entry for entry in descendants(guardian.pid)})
            watch = process(guardian.pid)
            if watch is not None:
                send(watch, signal.SIGKILL)
        killed: set[int] = set()

        def find() -> list[Process]:
            found = {entry.pid: entry for entry in of_run(self.run_id)}
            for pid, entry in self._known.items():
                now = process(pid)
                if now is not None and now.started == entry.started:
                    found.setdefault(pid, now)
            if guardian is not None:
                # Its exit is collected by subprocess.
                found.pop(guardian.pid, None)
            killed.update(found)
            return list(found.values())

        def reap() -> None:
            reap_children(killed)

        return end_all(find, reap, polite_s=0.0, total_s=seconds)


def _wait(guardian: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        guardian.wait(seconds)


def _pipe() -> tuple[FileIO, FileIO]:
    """Reading and writing end; closed when nobody refers to them any more."""
    reading, writing = os.pipe()
    return FileIO(reading, "rb"), FileIO(writing, "wb")


def described_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
