"""The process between the trainer and Gym that leaves nothing of Gym behind, however either of them ends.

It is two processes. The *guard* launches Gym, talks to the trainer over two pipes and ends everything when it
is told to, when Gym's command ends, or when the trainer is gone. It is a subreaper: whatever leaves Gym's
session or loses its parent becomes the guard's child, so the guard's descendants are all there is of Gym. The
*watch*, the guard's parent and itself a subreaper, only waits for the guard; if somebody kills the guard, the
watch inherits and ends the rest. If somebody kills the watch, the guard sees that and ends everything.
(A Ray worker that is killed takes its direct children along: that is the watch.)

Runs with ``-I -S``: standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

from .channel import Channel, send_message
from .ending import end_all
from .processes import Process, descendants, process, send

# From <linux/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36

_LOOK_S = 0.5
_FIRST_MESSAGE_S = 30.0
# Nobody waits for the result of a run whose trainer is gone.
_ORPHANED_S = 4.0
_MOST_GRACE_S = 5.0
_MOST_POLITE_S = 1.0

GUARD_KILLED = 70


def main() -> int:
    """Run the watch, and below it the guard; descriptor 0 brings orders and descriptor 1 takes reports."""
    # A trainer may block or ignore signals, and this process and Gym would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    orders = Channel(0)
    first = _first_message(orders)
    if first is None:
        return 0
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watch = os.getpid()
    guard = os.fork()
    if guard == 0:
        os.setsid()
        # Not inherited.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        return _Guard(first, orders, watch).run()
    return _watch(guard, first)


def _first_message(orders: Channel) -> dict[str, Any] | None:
    deadline = time.monotonic() + _FIRST_MESSAGE_S
    while not orders.closed and time.monotonic() < deadline:
        messages = orders.read(deadline - time.monotonic())
        if messages:
            return messages[0]
    return None


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) refused")


def _watch(guard: int, settings: dict[str, Any]) -> int:
    """Wait for the guard, and finish its work if it could not."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(guard, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = 0
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == guard:
            break
    if status == 0:
        return 0
    _end_descendants(polite_s=0.0, total_s=_ORPHANED_S)
    _remove(settings)
    return GUARD_KILLED


def _end_descendants(*, polite_s: float, total_s: float) -> list[Process]:
    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    return end_all(lambda: descendants(os.getpid()), reap, polite_s=polite_s, total_s=total_s)


def _remove(settings: dict[str, Any]) -> None:
    import shutil

    for path in settings["remove"]:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


class _Guard:
    """Launches, watches and ends one command and everything that comes of it."""

    def __init__(self, settings: dict[str, Any], orders: Channel, watch: int) -> None:
        self._settings = settings
        self._orders = orders
        self._watch = watch
        self._trainer = (int(settings["trainer"][0]), int(settings["trainer"][1]))
        self._stop_s: float | None = None
        self._command: Process | None = None
        self._status: int | None = None
        self._woken, wake = os.pipe()
        for descriptor in (self._woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._ask_stop(_ORPHANED_S)

    def _ask_stop(self, seconds: float) -> None:
        self._stop_s = seconds if self._stop_s is None else min(self._stop_s, seconds)

    def run(self) -> int:
        if not self._launch():
            _remove(self._settings)
            return 0
        while self._status is None and self._stop_s is None:
            self._look(_LOOK_S)
        stop_s = self._settings["shutdown_timeout_s"] if self._stop_s is None else self._stop_s
        began = time.monotonic()
        if self._status is None:
            self._interrupt(min(_MOST_GRACE_S, stop_s / 2))
            # Somebody may have become impatient.
            stop_s = min(stop_s, stop_s if self._stop_s is None else self._stop_s)
        polite_s = min(_MOST_POLITE_S, stop_s / 10)
        total_s = max(1.0, stop_s - (time.monotonic() - began))
        left = _end_descendants(polite_s=polite_s, total_s=total_s)
        _remove(self._settings)
        send_message(1, {"event": "ended", "survivors": [entry.pid for entry in left]})
        return 0

    def _launch(self) -> bool:
        settings = self._settings
        try:
            log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            child = subprocess.Popen(
                settings["command"],
                cwd=settings["folder"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            os.close(log)
        except OSError as error:
            send_message(1, {"event": "failed", "problem": str(error)})
            return False
        # Its exit is collected here, not by subprocess.
        child.returncode = 0
        # An error here leaves it to the watch.
        self._command = process(child.pid)
        send_message(1, {"event": "started", "pid": child.pid})
        return True

    def _look(self, timeout_s: float) -> None:
        """Take what happened within ``timeout_s`` seconds into account."""
        for message in self._orders.read(timeout_s, also=self._woken):
            if "stop_s" in message:
                self._ask_stop(float(message["stop_s"]))
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        self._reap()
        if self._trainer_is_gone() or self._orders.closed or os.getppid() != self._watch:
            self._ask_stop(_ORPHANED_S)
        if self._orders.closed:
            # Nothing is left to wait on but signals.
            time.sleep(0.02)

    def _trainer_is_gone(self) -> bool:
        try:
            trainer = process(self._trainer[0])
        except OSError:
            # The machine is out of file descriptors; the trainer's pipe still tells of its end.
            return False
        return trainer is None or not trainer.runs or trainer.started != self._trainer[1]

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._command is not None and pid == self._command.pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    send_message(1, {"event": "exited", "status": self._status})

    def _interrupt(self, grace_s: float) -> None:
        """Ask Gym to end by itself."""
        if self._command is None:
            return
        with contextlib.suppress(OSError):
            send(self._command, signal.SIGINT)
        deadline = time.monotonic() + grace_s
        while self._status is None and time.monotonic() < deadline:
            self._look(min(0.05, max(0.0, deadline - time.monotonic())))
            if self._stop_s is not None:
                deadline = min(deadline, time.monotonic() + self._stop_s / 2)


if __name__ == "__main__":
    sys.exit(main())
