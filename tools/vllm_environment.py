"""The environment with vLLM, `.venv-vllm`, for tests: installed through the front door when it is missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.bootstrap import BootstrapError, digest, environment_key, exclusive, read

NAME = ".venv-vllm"
#: a cold installation downloads about a gigabyte
TIMEOUT_S = 1500.0

_CHECK = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
_LAST_LINES = 20


class NoEnvironmentError(RuntimeError):
    """`.venv-vllm` is not there and could not be installed; says why and how to try by hand."""


def vllm_python(root: Path) -> Path:
    """Return the interpreter of the environment, which is installed first if it is not complete.

    Any number of processes may ask at once: one installs, the others wait. Where it is complete this takes
    milliseconds.

    Raises:
        NoEnvironmentError: it could not be installed within TIMEOUT_S.
    """
    python, stamp = root / NAME / "bin" / "python", root / NAME / "complete.key"
    try:
        # Not the front door's own lock, which `./hatch` takes itself.
        with exclusive(root / ".hatch" / "vllm.lock"):
            if not python.exists() or read(stamp) != complete_key(root):
                # Whatever becomes of the installation, what was there before is not there any more.
                stamp.unlink(missing_ok=True)
                install(root)
                stamp.write_text(complete_key(root))
    except BootstrapError as error:
        raise NoEnvironmentError(f"{NAME}: {error}") from error
    return python


def complete_key(root: Path) -> str:
    """Everything that decides what is in the environment: pins, place, and what the members declare."""
    declarations = [root / "hatch.toml", *sorted(root.glob("packages/*/pyproject.toml"))]
    declarations += sorted(root.glob("apps/*/pyproject.toml"))
    return digest(environment_key(root, NAME).encode(), *(file.read_bytes() for file in declarations))


def install(root: Path) -> None:
    """Let the front door make the environment, and see that vLLM is in it.

    Raises:
        NoEnvironmentError: with the last lines of what it said.
    """
    command = ["./hatch", "run", "vllm:python", "-c", _CHECK]
    try:
        done = subprocess.run(
            command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise NoEnvironmentError(f"{NAME} was not installed within {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:])
        raise NoEnvironmentError(
            f"{NAME} could not be installed; try `./hatch run vllm:python --version`:\n{said}"
        )
