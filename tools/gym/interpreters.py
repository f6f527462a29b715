"""Finds a Python that is new enough for NeMo Gym."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

from tools.interpreters import candidates, version_of

MINIMUM = (3, 12)
#: Names the interpreter to use.
VARIABLE = "RL_GYM_BASE_PYTHON"
# The versions that the pinned release of Gym is known to install on come first.
_MINORS = ("3.12", "3.13", "3.14")


class NoPythonError(RuntimeError):
    """No interpreter that Gym could run in."""


def base_python(named: str | None = None) -> str:
    """An interpreter for Gym: the one that is named, else the first that runs.

    Looked for in ``RL_GYM_BASE_PYTHON``, on PATH, among pyenv's versions and where uv finds some.

    Raises:
        NoPythonError: the named one is not fit, or none was found; says what to do.
    """
    wanted = named or os.environ.get(VARIABLE)
    if wanted:
        if not _fits(wanted):
            raise NoPythonError(f"{wanted} is no Python {_dotted(MINIMUM)} or newer that runs; name another")
        return wanted
    for candidate in _candidates():
        if _fits(candidate):
            return candidate
    raise NoPythonError(
        f"NeMo Gym needs Python {_dotted(MINIMUM)} or newer, and none was found on PATH, among pyenv's "
        f"versions or by uv; install one and name it with --python or {VARIABLE}"
    )


def _candidates() -> Iterator[str]:
    for minor in _MINORS:
        yield from candidates(minor)
    uv = shutil.which("uv")
    if uv:
        asked = [uv, "python", "find", "--no-project", "--no-python-downloads", f">={_dotted(MINIMUM)}"]
        done = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0:
            yield done.stdout.strip()


def _fits(python: str) -> bool:
    version = version_of(python)
    return version is not None and version >= MINIMUM


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
