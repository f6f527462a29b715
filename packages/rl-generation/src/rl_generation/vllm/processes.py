"""The processes of an engine: how they are made, noticed when they die, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Literal

from .environment import variable_set

_POLL_S = 0.01


def start_method(
    cpu: bool, threads: int, wanted: Literal["fork", "spawn"] | None
) -> Literal["fork", "spawn"]:
    """How to make the engine's process.

    A fork needs no second import of vLLM. It is safe where the child never opens a parallel region, whose
    threads it would not have, and where no device was touched.
    """
    return wanted or ("fork" if cpu and threads == 1 else "spawn")


@contextlib.contextmanager
def making_processes(method: Literal["fork", "spawn"]) -> Generator[None]:
    """The scope in which vLLM makes its processes by this method, also within a Ray actor.

    Its own rule for actors exists for processes that talk to Ray. The engine's does not.
    """
    allowed = _no_forced_spawn() if method == "fork" else contextlib.nullcontext()
    with variable_set("VLLM_WORKER_MULTIPROC_METHOD", method), allowed:
        yield


@contextlib.contextmanager
def importing() -> Generator[None]:
    """The scope in which very much is imported: nothing of it is garbage, so it is not searched for any."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def heap_frozen() -> Generator[None]:
    """The scope in which a process is forked that shall not search what it was given for garbage.

    vLLM collects several times while it starts: seconds in a process that has imported all of it.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def killed_after(timeout_s: float) -> Generator[None]:
    """The scope in which processes that the running thread makes are killed once the time is up.

    vLLM waits without a deadline for its process to come up, but it notices a death.
    """
    thread = threading.get_native_id()
    before = set(children_of_thread(thread))

    left = threading.Event()

    def guard() -> None:
        patience_s = timeout_s
        # Again and again: the first may be made after the time is up.
        while not left.wait(patience_s):
            kill_all(set(children_of_thread(thread)) - before)
            patience_s = _POLL_S

    threading.Thread(target=guard, name="start-deadline", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def children_of_thread(thread: int) -> list[int]:
    """Ids of the living processes that a thread of this process has made."""
    try:
        with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def descendants(roots: Iterable[int]) -> list[int]:
    """``roots`` and all processes below them, parents first."""
    found: list[int] = []
    pending = list(roots)
    while pending:
        pid = pending.pop(0)
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    pending.extend(int(word) for word in file.read().split())
    return found


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL; those that are gone are none of its concern."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not collected does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def wait_until_dead(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Those that still run after ``timeout_s``; blocks until then or until none does."""
    deadline = time.monotonic() + timeout_s
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [pid for pid in left if is_alive(pid)]
    return left


class DeathWatch:
    """Notices within milliseconds that a process has ended. All on one event loop."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def watch(self, pids: Iterable[int], callback: Callable[[int], None]) -> None:
        """Have ``callback`` called with the id of each process that ends from now on, or has ended."""
        loop = asyncio.get_running_loop()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                loop.call_soon(callback, pid)
                continue
            self._descriptors.append(descriptor)
            loop.add_reader(descriptor, self._ended, descriptor, pid, callback)

    def close(self) -> None:
        """Watch no longer; idempotent."""
        for descriptor in self._descriptors:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()

    def _ended(self, descriptor: int, pid: int, callback: Callable[[int], None]) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._descriptors.remove(descriptor)
        os.close(descriptor)
        callback(pid)


@contextlib.contextmanager
def _no_forced_spawn() -> Generator[None]:
    from vllm.utils import system_utils

    original = getattr(system_utils, "_maybe_force_spawn", None)
    if original is None:
        yield
        return
    system_utils._maybe_force_spawn = lambda: None
    try:
        yield
    finally:
        system_utils._maybe_force_spawn = original
