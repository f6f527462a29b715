"""One builder at a time, across processes; a dead one holds nobody up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator

from .errors import BuildTimeoutError

_POLL_S = 0.1


@contextlib.contextmanager
def exclusive(path: str, *, deadline: float) -> Generator[int]:
    """Hold the lock file at ``path`` for the block; the value is its descriptor.

    The kernel frees it when the last process that inherited the descriptor has ended. A builder hands it
    to its children, so that after its own death the next one waits until nothing writes any more.

    Args:
        path: of the lock file, which stays.
        deadline: value of ``time.monotonic()`` until when to wait.

    Raises:
        BuildTimeoutError: another process has it until the deadline.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    began = time.monotonic()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise BuildTimeoutError(
                        f"waited {time.monotonic() - began:.0f} s for process {_holder(descriptor)}, which "
                        f"holds {path}; end it, or allow more time"
                    ) from error
                time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode("ascii", "replace") or "(unknown)"
