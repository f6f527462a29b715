"""Files that vLLM needs while it starts and never again: sockets to connect by, a file to meet by."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from uuid import uuid4

from .environment import variable_set

ROOT = "RL_ENGINE_SCRATCH"
"""Environment variable that names a folder which somebody else removes, however this process ends."""

_SOCKETS = "VLLM_RPC_BASE_PATH"
_STORE = "vllm_dist_"
_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def start_files() -> Generator[Path]:
    """The scope of a start, with a folder for its files that is gone afterwards.

    Connected sockets and open segments of shared memory live on without their names, so that nothing is left
    behind even where everything is killed later. A process that is killed within the scope leaves the folder
    to whoever removes that of :data:`ROOT`. Starts at the same time share one, as they share the environment.
    """
    folder = _STARTS.enter()
    try:
        yield folder
    finally:
        _STARTS.leave()


class _Starts:
    """Those that go on in this process now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._scope = contextlib.ExitStack()
        self._folder = Path()

    def enter(self) -> Path:
        with self._lock:
            if not self._count:
                self._folder = self._scope.enter_context(_folder())
            self._count += 1
            return self._folder

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._scope.close()


_STARTS = _Starts()


@contextlib.contextmanager
def _folder() -> Generator[Path]:
    root = os.environ.get(ROOT)
    folder = Path(tempfile.mkdtemp(prefix="vllm-", dir=root if root and os.path.isdir(root) else None))
    try:
        with variable_set(_SOCKETS, str(folder)):
            yield folder
    finally:
        _remove_segments(folder, _SHARED_MEMORY)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def meeting_there(executors: ModuleType) -> Generator[None]:
    """The scope in which processes of an engine meet by a file of the start's folder.

    Args:
        executors: vLLM's module that chooses the file.
    """
    chosen = getattr(executors, "get_file_store_init_method", None)
    folder = os.environ.get(_SOCKETS)
    if chosen is None or folder is None:
        yield
        return

    def place() -> str:
        return f"file://{folder}/{_STORE}{uuid4().hex}"

    executors.__dict__["get_file_store_init_method"] = place
    try:
        yield
    finally:
        executors.__dict__["get_file_store_init_method"] = chosen


def _remove_segments(folder: Path, shared_memory: Path) -> None:
    """vLLM names the shared memory of tensor-parallel workers on a CPU after the file that they met by."""
    for store in folder.glob(f"{_STORE}*"):
        for segment in shared_memory.glob(f"{store.name}-*"):
            segment.unlink(missing_ok=True)
