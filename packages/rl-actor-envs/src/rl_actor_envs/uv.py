"""Runs ``uv`` with a deadline, and in surroundings that do not shape what it installs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from .deadline import TIMEOUT_VARIABLE, Deadline
from .errors import UvError, UvMissingError

if TYPE_CHECKING:
    import subprocess

#: Settings of the calling environment that choose another target, other versions or another interpreter than
#: an environment has to have. Those that say where files come from (indexes, mirrors, caches) pass.
_STRIPPED = frozenset(
    [
        *("CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"),
        *("UV_BREAK_SYSTEM_PACKAGES", "UV_BUILD_CONSTRAINT", "UV_CONSTRAINT", "UV_DEV", "UV_EXCLUDE"),
        *("UV_EXCLUDE_NEWER", "UV_FORK_STRATEGY", "UV_FROZEN", "UV_ISOLATED", "UV_LOCKED", "UV_NO_BINARY"),
        *("UV_NO_BINARY_PACKAGE", "UV_NO_BUILD_ISOLATION", "UV_NO_DEFAULT_GROUPS", "UV_NO_DEV"),
        *("UV_NO_EDITABLE", "UV_NO_GROUP", "UV_NO_PROJECT", "UV_NO_SOURCES", "UV_NO_SYNC"),
        *("UV_NO_VERIFY_HASHES", "UV_OVERRIDE", "UV_PRERELEASE", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT"),
        *("UV_PYTHON", "UV_REQUIRE_HASHES", "UV_RESOLUTION", "UV_SYSTEM_PYTHON", "UV_VENV_CLEAR"),
        *("UV_VENV_RELOCATABLE", "UV_VENV_SEED", "UV_WORKING_DIR", "UV_WORKING_DIRECTORY"),
    ]
)
#: Each chooses a build of torch that is another file than the lock's.
TORCH_CHOICES = ("UV_TORCH_BACKEND", "UV_FIND_LINKS")
_LAST_LINES = 30
_KILL_GRACE_S = 10.0


def find_uv() -> str:
    """Absolute path of ``uv``: on PATH, else beside the running interpreter.

    Raises:
        UvMissingError: in neither place.
    """
    import shutil

    beside = os.path.dirname(sys.executable or "")
    found = shutil.which("uv") or shutil.which("uv", path=beside or os.defpath)
    if found is None:
        raise UvMissingError(
            f"uv, which builds environments, is neither on PATH ({os.environ.get('PATH', '')}) nor beside "
            f"the interpreter ({beside}); install it with `pip install uv`, or put its folder on PATH"
        )
    return os.path.abspath(found)


def torch_chosen() -> bool:
    """Whether the person has chosen another build of torch than the lock's."""
    return any(os.environ.get(name) for name in TORCH_CHOICES)


class Uv:
    """The ``uv`` of one build.

    Args:
        path: of the executable.
        deadline: by which each of its commands has to be done.
        lock_fd: open lock file that it and its children keep.
    """

    def __init__(self, path: str, deadline: Deadline, lock_fd: int) -> None:
        self._path = path
        self._deadline = deadline
        self._lock_fd = lock_fd

    def run(self, *arguments: str, folder: str) -> str:
        """Run one command in ``folder`` and return its standard output.

        Raises:
            UvError: it could not start, failed, or was not done in time, in which case it and its children
                have been ended.
        """
        import subprocess
        import tempfile

        command = f"uv {' '.join(arguments)}"
        # Files, not pipes: a uv that outlives this process can still write to its end, and one whose
        # children do not end holds nobody up.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                child = subprocess.Popen(
                    [self._path, *arguments],
                    cwd=folder,
                    env=child_environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=(self._lock_fd,),
                    start_new_session=True,
                )
            except OSError as error:
                raise UvError(f"`{command}` could not start in {folder} ({error})") from error
            try:
                status = child.wait(timeout=self._deadline.left_s)
            except subprocess.TimeoutExpired as error:
                _end(child)
                raise UvError(
                    f"`{command}` was not done {self._deadline.seconds:g} s after the build began and was "
                    f"ended; allow more with {TIMEOUT_VARIABLE}. Its last words: {_last_lines(err) or 'none'}"
                ) from error
            except BaseException:
                _end(child)
                raise
            if status:
                raise UvError(f"`{command}` in {folder} ended with {status}:\n{_last_lines(err)}")
            out.seek(0)
            return out.read().decode("utf-8")


def child_environment(surroundings: Mapping[str, str]) -> dict[str, str]:
    """``surroundings`` less what would make ``uv`` build something else; hardlinks unless told otherwise."""
    kept = {
        name: value
        for name, value in surroundings.items()
        if name not in _STRIPPED and (value or not name.startswith("UV_"))
    }
    kept.setdefault("UV_LINK_MODE", "hardlink")
    return kept


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it started: it leads a session of its own."""
    import signal
    import subprocess

    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_KILL_GRACE_S)


def _last_lines(file: IO[bytes]) -> str:
    file.seek(0)
    return "\n".join(file.read().decode("utf-8", "replace").strip().splitlines()[-_LAST_LINES:])
