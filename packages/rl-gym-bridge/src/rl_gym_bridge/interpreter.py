"""Finds the Python interpreter that has NeMo Gym: Gym's Python and packages are not the trainer's."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .failures import GymConfigError
from .redaction import redacted_text

VARIABLE = "RL_GYM_PYTHON"

_LEAST_PYTHON = (3, 12)
_REMEDY = (
    "install Gym into an environment of its own (`uv venv --python 3.12 GYM`, "
    "`uv pip install --python GYM nemo-gym`) "
    f"and name it: NemoGymConfig(python='GYM') or {VARIABLE}=GYM"
)

# Runs in the other interpreter. It does not import nemo_gym, which takes seconds.
_ASK = """
import importlib.metadata, importlib.util, json, os, sys
try:
    version = importlib.metadata.version("nemo-gym")
except importlib.metadata.PackageNotFoundError:
    version = ""
spec = importlib.util.find_spec("nemo_gym")
origin = spec.origin if spec else None
root = os.path.dirname(os.path.dirname(origin)) if origin else ""
print(json.dumps({
    "python": list(sys.version_info[:3]), "version": version, "prefix": sys.prefix, "found": bool(origin),
    "checkout": bool(root) and os.path.exists(os.path.join(root, "pyproject.toml")),
}))
"""


@dataclass(frozen=True, slots=True)
class GymInterpreter:
    """An interpreter that can run Gym.

    Attributes:
        python: its executable.
        gym: Gym's command line, beside it.
        version: Gym's version.
        python_version: version of the interpreter.
        servers: folder of environments per server that need no preparation, ``None`` where Gym makes its own.
        checkout: whether Gym runs from a checkout of its repository, where it keeps its caches.
    """

    python: Path
    gym: Path
    version: str
    python_version: str
    servers: Path | None = None
    checkout: bool = False

    @property
    def release(self) -> tuple[int, ...]:
        """Gym's version as numbers: ``(0, 7, 0)``."""
        numbers = []
        for part in self.version.split("."):
            digits = "".join(character for character in part if character.isdigit())
            if not digits:
                break
            numbers.append(int(digits))
        return tuple(numbers)


def find_gym_interpreter(
    python: str | None = None, *, environ: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> GymInterpreter:
    """The interpreter at ``python``, else at ``RL_GYM_PYTHON``.

    Each may be an executable or a virtual environment.

    Raises:
        GymConfigError: there is none, it does not answer within ``timeout_s``, it is older than 3.12, or it
            lacks Gym.
    """
    environ = os.environ if environ is None else environ
    named, setting = (python, "python") if python else (environ.get(VARIABLE), VARIABLE)
    if not named:
        raise GymConfigError("no interpreter with NeMo Gym is named", component="python", remedy=_REMEDY)
    executable = _executable(Path(named).expanduser(), setting)
    facts = _ask(executable, setting, timeout_s)
    version = tuple(int(number) for number in facts["python"])
    shown = ".".join(str(number) for number in version)
    if version < _LEAST_PYTHON:
        raise _refusal(f"it is Python {shown}, and Gym needs 3.12 or newer", setting, executable)
    if not facts["version"] or not facts["found"]:
        raise _refusal(f"Python {shown} there has no package nemo-gym", setting, executable)
    gym = executable.with_name("gym")
    if not os.access(gym, os.X_OK):
        raise _refusal(
            f"nemo-gym {facts['version']} is installed but its command {gym.name} is not there", setting, gym
        )
    servers = Path(facts["prefix"], "servers")
    return GymInterpreter(
        python=executable,
        gym=gym,
        version=str(facts["version"]),
        python_version=shown,
        servers=servers if servers.is_dir() else None,
        checkout=bool(facts["checkout"]),
    )


def _executable(named: Path, setting: str) -> Path:
    # Links stay: the name by which Python is started decides which environment it is.
    path = Path(os.path.abspath(named))
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise _refusal("there is no such program", setting, path)
    return path


def _ask(executable: Path, setting: str, timeout_s: float) -> dict[str, Any]:
    try:
        answer = subprocess.run(
            [str(executable), "-I", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(f"it did not answer within {timeout_s:g} s", setting, executable) from error
    except OSError as error:
        raise _refusal(f"it cannot be started: {error.strerror}", setting, executable) from error
    try:
        facts = json.loads(answer.stdout)
        if isinstance(facts, dict) and {"python", "version", "prefix", "found", "checkout"} <= set(facts):
            return facts
    except ValueError:
        pass
    said = redacted_text(answer.stderr.decode(errors="replace").strip()[-300:])
    raise _refusal(f"it is no Python (exit code {answer.returncode}) {said}".rstrip(), setting, executable)


def _refusal(problem: str, setting: str, path: Path) -> GymConfigError:
    return GymConfigError(problem, component=setting, address=str(path), remedy=_REMEDY)
