"""Starts gloo ranks as processes and runs functions of test files in them.

A rank costs seconds to start, so a module starts its ranks once and calls them often. Run as a
script this file is one rank: test files beside it are then importable by name, which is how a
function is found in both places.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
import torch.distributed as dist

_START_SECONDS = 90.0
# Once one rank failed, the others may be waiting for it: they get this long to say what they know.
_GRACE_SECONDS = 3.0
_SHOWN_CHARACTERS = 4000


class Ranks:
    """``world`` processes joined in one torch.distributed world over loopback."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._stderr: list[IO[bytes]] = []
        self._store: dist.TCPStore | None = None

    @property
    def pids(self) -> list[int]:
        """Process numbers by rank; empty before the first call."""
        return [process.pid for process in self._processes]

    def call(self, function: str, *, seconds: float = 180.0, **arguments: Any) -> list[Any]:
        """``function`` is ``"test file without .py:function"``; called on all ranks at once.

        The function gets ``arguments`` by name and may return anything made of plain values and CPU
        tensors. Ranks are started when there are none, also after a failure.

        Returns:
            What each rank returned, by rank.

        Raises:
            AssertionError: a rank raised, died or did not answer in time; all ranks are then ended.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, arguments))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(message)
            except OSError:
                self._fail({rank: "had ended before the call"})
        return self._answers(seconds, function)

    def close(self) -> None:
        """End all ranks; idempotent."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for file in self._stderr:
            file.close()
        self._processes, self._connections, self._stderr, self._store = [], [], [], None

    def _start(self) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_SECONDS)
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(self.world):
            ours, theirs = Pipe()
            stderr = TemporaryFile()  # noqa: SIM115 (open as long as the rank lives)
            command = [sys.executable, str(Path(__file__).absolute())]
            numbers = (rank, self.world, self._store.port, theirs.fileno())
            process = subprocess.Popen(
                [*command, *map(str, numbers)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._stderr.append(stderr)
        self._answers(_START_SECONDS, "joining torch.distributed")

    def _answers(self, seconds: float, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while len(answers) + len(failures) < self.world:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in answers and rank not in failures
            }
            ready: Any = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                if not failures:
                    failures = {rank: f"no answer within {seconds} s ({what})" for rank in waiting.values()}
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = f"died with exit code {self._processes[rank].wait()} ({what})"
                else:
                    (answers if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            self._fail(failures)
        return [answers[rank] for rank in range(self.world)]

    def _fail(self, failures: dict[int, str]) -> None:
        told = []
        for rank, failure in sorted(failures.items()):
            self._stderr[rank].seek(0)
            output = self._stderr[rank].read().decode(errors="replace")[-_SHOWN_CHARACTERS:]
            told.append(f"rank {rank} of {self.world}: {failure}\n{output}")
        for process in self._processes:
            process.kill()
        self.close()
        raise AssertionError("\n".join(told))


def _serve(rank: int, world: int, port: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_START_SECONDS))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=_START_SECONDS)
    )
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        file, _, name = function.partition(":")
        try:
            answer = True, getattr(importlib.import_module(file), name)(**arguments)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(*(int(number) for number in sys.argv[1:4]), Connection(int(sys.argv[4])))
    # The others may be gone already; nothing is left to agree on with them.
    os._exit(0)
