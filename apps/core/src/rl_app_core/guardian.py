"""A small process that outlives the driver just long enough to end everything the driver started.

Ray's daemons share the driver's fate, but their own helpers notice a death by polling, and some wait a
minute for a server that is gone. The guardian waits on a pipe that only the driver holds. When the pipe
closes, however the driver ended, it kills every process that carries the run's mark in its environment or
holds a file of the run's scratch folder, and deletes that folder.

Run by path as a script it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

MARK = "RL_RUN_MARK"
_SWEEP_S = 5.0
_PAUSE_S = 0.1


@contextlib.contextmanager
def guarded_children(scratch: Path, *, wait_s: float) -> Generator[None]:
    """Every process started inside the block ends with it, or with this process if that is killed.

    Children are recognised by an environment variable that they inherit and by files of the scratch
    folder, so whatever they detach from (session, process group, parent) they are found. Linux only:
    elsewhere it does nothing.

    Args:
        scratch: a folder of theirs that is deleted afterwards, too.
        wait_s: how long the end of the block may wait for the last of them.
    """
    if not Path("/proc/self/environ").exists():
        yield
        return
    before = os.environ.get(MARK)
    mark = secrets.token_hex(8)
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[MARK] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        if watcher.stdin is not None:
            watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(wait_s)


def belonging_processes(mark: str, scratch: str) -> list[int]:
    """Process ids that carry the mark or hold a file open below ``scratch``.

    Zombies, the calling process and its parent are left out.

    Both are needed: a process that gives itself a title (as Ray's do) overwrites its environment, and one
    of ours that is no daemon of Ray has no file there.
    """
    wanted = f"{MARK}={mark}".encode()
    below = scratch.rstrip("/") + "/"
    # The driver, which may live on, is the guardian's parent and has files there itself.
    spared = {os.getpid(), os.getppid()}
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        # It may end while it is looked at. Of a zombie both are empty.
        with contextlib.suppress(OSError):
            marked = wanted in Path(entry.path, "environ").read_bytes().split(b"\0")
            if marked or any(_target(link).startswith(below) for link in os.scandir(f"{entry.path}/fd")):
                found.append(int(entry.name))
    return found


def _target(link: os.DirEntry[str]) -> str:
    try:
        return os.readlink(link.path)
    except OSError:
        return ""


def _watch(mark: str, scratch: str) -> None:
    # A terminal's Ctrl-C and hang-up are meant for the driver, which may want to end in its own time.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _SWEEP_S
    while (left := belonging_processes(mark, scratch)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _watch(*sys.argv[1:])
