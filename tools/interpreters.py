"""Finds Python interpreters of this machine that run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_TIMEOUT_S = 60.0


def candidates(minor: str) -> Iterator[str]:
    """Where a Python of a version such as ``3.12`` may be: on PATH, and among pyenv's, the newest first."""
    on_path = shutil.which(f"python{minor}")
    if on_path:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    yield from map(str, sorted(pyenv.glob(f"{minor}.*/bin/python"), reverse=True))


def version_of(python: str) -> tuple[int, int] | None:
    """Major and minor version of an interpreter; ``None`` where it does not run, as pyenv's shims may."""
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return (int(words[0]), int(words[1])) if done.returncode == 0 and len(words) == 2 else None
