"""One builder per environment: a file lock that a dead builder's children keep until they end, too."""

from __future__ import annotations

import fcntl
import os
import time
from types import TracebackType

from .deadline import TIMEOUT_VARIABLE, Deadline, build_timeout_s
from .errors import BuildError, LockTimeoutError

_POLL_S = 0.1


class BuildLock:
    """The lock file beside an environment, held inside a ``with`` block.

    The kernel drops the lock when the last process that has the file open ends. Children get the open file,
    so a killed builder's ``uv`` that still writes keeps others out.

    Args:
        path: of the lock file; its folder is made when it is not there. It is never removed.

    Raises (on entering):
        LockTimeoutError: it was not free within ``RL_ACTOR_ENVS_BUILD_TIMEOUT_S``.
        BuildError: the file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    @property
    def fd(self) -> int:
        """The open file that children have to inherit."""
        return self._fd

    def __enter__(self) -> BuildLock:
        deadline = Deadline(build_timeout_s())
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BuildError(
                f"the lock {self._path} cannot be made ({error.strerror or error}); environments are built "
                f"beside it: choose a folder that can be written, with RL_ACTOR_ENVS_DIR for instance"
            ) from error
        try:
            while not self._take():
                if not deadline.left_s:
                    raise LockTimeoutError(
                        f"waited {deadline.elapsed_s:.1f} s for {self._path}, which {self._holder()} holds "
                        f"while it builds the same environment; end it if it does not get on, or allow more "
                        f"with {TIMEOUT_VARIABLE}"
                    )
                time.sleep(min(_POLL_S, deadline.left_s))
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            # All children have ended, but another thread may have forked a process that has the file open.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        # After a failure only closed: a child that could not be ended may still be at work.
        os.close(self._fd)

    def _take(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> str:
        pid = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
        if not pid.isdigit():
            return "another process"
        alive = os.path.exists(f"/proc/{pid}") or not os.path.isdir("/proc/self")
        return f"process {pid}" if alive else f"a child of process {pid}, which has ended,"
