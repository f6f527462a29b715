"""Runs uv: found or told how to get it, with a deadline, and with its own words when it fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from .errors import BuildError, BuildTimeoutError

_LAST_LINES = 12
# Settings that a surrounding environment has for itself, and that would change what is installed here.
_NOT_OURS = frozenset(
    {
        "CONDA_PREFIX",
        "UV_BUILD_CONSTRAINT",
        "UV_CONSTRAINT",
        "UV_EXCLUDE",
        "UV_EXCLUDE_NEWER",
        "UV_FROZEN",
        "UV_LOCKED",
        "UV_NO_EDITABLE",
        "UV_NO_VERIFY_HASHES",
        "UV_OVERRIDE",
        "UV_PROJECT",
        "UV_PROJECT_ENVIRONMENT",
        "UV_PYTHON",
        "UV_REQUIRE_HASHES",
        "UV_SYSTEM_PYTHON",
        "UV_WORKING_DIR",
        "VIRTUAL_ENV",
    }
)


class Uv:
    """The uv of this machine, for one build.

    Args:
        deadline: value of ``time.monotonic()`` after which nothing runs any more.
        inherited: file descriptors that every uv keeps open, and so do the processes that it starts.

    Raises:
        BuildError: there is no uv.
    """

    def __init__(self, *, deadline: float, inherited: Sequence[int] = ()) -> None:
        self._executable = find_uv()
        self._deadline = deadline
        self._inherited = tuple(inherited)

    def run(self, *arguments: str, cwd: str) -> str:
        """Run ``uv ARGUMENTS`` in ``cwd`` and return its standard output.

        Raises:
            BuildError: it failed; names the command, the status and the last lines that it wrote.
            BuildTimeoutError: the deadline passed; it and what it started are ended.
        """
        shown = " ".join(("uv", *arguments))
        child = subprocess.Popen(
            [self._executable, *arguments],
            cwd=cwd,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=self._inherited,
            start_new_session=True,
        )
        try:
            output, said = child.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise BuildTimeoutError(f"`{shown}` did not end in time and was stopped") from error
        finally:
            if child.poll() is None:
                # Its own session: the group is everything that it started.
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
        if child.returncode:
            last = "\n".join(said.strip().splitlines()[-_LAST_LINES:])
            raise BuildError(f"`{shown}` ended with {child.returncode}: {last}")
        return output


def find_uv() -> str:
    """Path of the uv on PATH, else of the one beside this interpreter.

    Raises:
        BuildError: there is neither.
    """
    found = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable) or os.defpath)
    if found is None:
        raise BuildError(
            "uv, which builds the actors' environments, is not on PATH; install it (`pip install uv`, or "
            "`./hatch run …` in a checkout brings its own) and try again"
        )
    return found


def other_torch_build_chosen() -> bool:
    """Whether uv is told to take another build of torch than the one whose hash the lock holds."""
    return any(os.environ.get(name) for name in ("UV_TORCH_BACKEND", "UV_FIND_LINKS"))


def _environment(current: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in current.items() if name not in _NOT_OURS}
