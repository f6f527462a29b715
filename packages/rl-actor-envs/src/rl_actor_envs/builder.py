"""Builds environments: once each, whole or not at all, however many processes ask."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Literal

from .errors import ActorEnvironmentError, BuildError
from .exclusive import exclusive
from .identity import EnvironmentSpec
from .markers import DEPENDENCIES, ENVIRONMENT, is_marked, write_marker
from .requirements import Requirements, read_requirements
from .uv import Uv
from .workspace import Workspace, project_of

TIMEOUT_VARIABLE = "RL_ACTOR_ENVS_BUILD_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 3600.0

#: hashed pins of hatch and all it builds with
_BUILD_CONSTRAINTS = os.path.join("requirements", "boot.txt")

Phase = Literal["dependencies", "all"]


def ensure_environment(
    spec: EnvironmentSpec,
    workspace: Workspace,
    *,
    selection: Sequence[str] | None = None,
    phase: Phase = "all",
    python: str | None = None,
) -> bool:
    """Build the environment if it is not there; return whether this call built it.

    Of any number of processes that ask for the same environment one builds it and the others wait. What
    a builder that was killed left behind is removed, and the environment is built again.

    Args:
        spec: which environment.
        workspace: what it is built from.
        selection: uv's flags for what goes into it; by default the spec's extras.
        phase: ``dependencies`` installs third-party packages only and needs no source of the workspace;
            a later call with ``all`` adds the members.
        python: path of the interpreter to build it with; must be of the spec's kind.

    Raises:
        BuildError: uv is missing or failed; names what it said.
        BuildTimeoutError: it took, or another process takes, longer than ``RL_ACTOR_ENVS_BUILD_TIMEOUT_S``.
    """
    wanted = DEPENDENCIES if phase == "dependencies" else ENVIRONMENT
    if is_marked(spec, wanted):
        return False
    deadline = time.monotonic() + build_timeout_s()
    try:
        with exclusive(spec.root + ".lock", deadline=deadline) as descriptor:
            if is_marked(spec, wanted):
                return False
            uv = Uv(deadline=deadline, inherited=[descriptor])
            flags = selection_flags(spec.extras) if selection is None else selection
            requirements = read_requirements(uv, workspace, project_of(spec.extras), flags)
            if not is_marked(spec, DEPENDENCIES):
                _install_dependencies(uv, spec, requirements, python)
            if phase == "all":
                _install_members(uv, spec, requirements, workspace)
            return True
    except ActorEnvironmentError as error:
        raise type(error)(f"the environment of {spec.actor}: {error}", actor=spec.actor) from error
    except OSError as error:
        raise BuildError(
            f"the environment of {spec.actor}: {spec.root} cannot be written ({error}); free the disk, or "
            f"choose another directory",
            actor=spec.actor,
        ) from error


def selection_flags(extras: Sequence[str]) -> tuple[str, ...]:
    """``("--extra", "a", "--extra", "b")``."""
    return tuple(flag for extra in extras for flag in ("--extra", extra))


def build_timeout_s() -> float:
    """Seconds that one build, or the wait for another's, may take.

    Raises:
        BuildError: ``RL_ACTOR_ENVS_BUILD_TIMEOUT_S`` is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise BuildError(f"{TIMEOUT_VARIABLE} is {text!r}; set it to a number of seconds, or unset it")
    return seconds


def _install_dependencies(
    uv: Uv, spec: EnvironmentSpec, requirements: Requirements, python: str | None
) -> None:
    # A directory without its marker is what a dead builder left.
    shutil.rmtree(spec.root, ignore_errors=True)
    # A folder without a project above it, so that no other project's settings apply.
    with tempfile.TemporaryDirectory(prefix="rl-actor-envs-") as folder:
        interpreter = [f"--python={python}"] if python else []
        uv.run(
            "venv", "--quiet", "--no-project", "--no-python-downloads", *interpreter, spec.root, cwd=folder
        )
        packages = _write(folder, "packages.txt", requirements.packages)
        into = ("--quiet", "--link-mode=hardlink", f"--python={spec.interpreter}")
        if requirements.unhashed:
            pins = _write(folder, "unhashed.txt", "".join(f"{pin}\n" for pin in requirements.unhashed))
            constraints = _write(folder, "constraints.txt", requirements.constraints)
            chosen = (f"--requirement={packages}", f"--requirement={pins}", f"--constraints={constraints}")
            uv.run("pip", "install", *into, *chosen, cwd=folder)
        elif requirements.packages:
            uv.run("pip", "sync", *into, "--require-hashes", packages, cwd=folder)
    # uv does not wait for the disk; the marker must not get there first.
    os.sync()
    write_marker(spec, DEPENDENCIES, {"unhashed": " ".join(requirements.unhashed)})


def _install_members(uv: Uv, spec: EnvironmentSpec, requirements: Requirements, workspace: Workspace) -> None:
    constraints = workspace.path(_BUILD_CONSTRAINTS)
    editable = [f"--editable={member}" for member in requirements.members]
    with tempfile.TemporaryDirectory(prefix="rl-actor-envs-") as folder:
        if editable:
            uv.run(
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                f"--build-constraints={constraints}",
                f"--python={spec.interpreter}",
                *editable,
                cwd=folder,
            )
    os.sync()
    write_marker(spec, ENVIRONMENT, {"unhashed": " ".join(requirements.unhashed)})


def _write(folder: str, name: str, text: str) -> str:
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path
