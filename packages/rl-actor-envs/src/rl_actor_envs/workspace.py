"""The checkout that environments are built from, and which of its locks holds for which extras."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from .errors import WorkspaceError

WORKSPACE_VARIABLE = "RL_ACTOR_ENVS_WORKSPACE"
DIRECTORY_VARIABLE = "RL_ACTOR_ENVS_DIR"

LOCK = "uv.lock"
CONTAINER = os.path.join("apps", "container")
#: TensorRT-LLM breaks the resolution of everything else and has a project and a lock of its own.
SEPARATE_EXTRA = "trtllm"


class Project(NamedTuple):
    """A uv project whose lock says what environments hold.

    Attributes:
        folder: absolute path of the folder with its lock.
        package: the distribution whose extras are the building blocks.
        unhashed: packages that its lock pins by version alone, because their wheels lie on another index.
    """

    folder: str
    package: str
    unhashed: tuple[str, ...] = ()

    @property
    def lock(self) -> str:
        """Absolute path of the lock file; it need not exist."""
        return os.path.join(self.folder, LOCK)


class Workspace(NamedTuple):
    """A folder with ``uv.lock``, ``pyproject.toml``, ``packages/*`` and ``apps/*``.

    Attributes:
        root: its absolute path, free of symbolic links.
    """

    root: str

    def project_of(self, extras: Collection[str]) -> Project:
        """The project that environments with ``extras`` are built from."""
        if SEPARATE_EXTRA in extras:
            folder = os.path.join(self.root, CONTAINER, SEPARATE_EXTRA)
            return Project(folder, "rl-app-container-trtllm", unhashed=("tensorrt-llm",))
        return Project(self.root, "rl-app-container")

    @property
    def environments(self) -> str:
        """Absolute path of the directory that holds the environments; it need not exist."""
        chosen = os.environ.get(DIRECTORY_VARIABLE) or os.path.join(self.root, ".actor-envs")
        return os.path.abspath(os.path.expanduser(chosen))


def find_workspace(root: str | os.PathLike[str] | None = None) -> Workspace:
    """The workspace at ``root``, else the one in ``RL_ACTOR_ENVS_WORKSPACE``, else the one this file lies in.

    Raises:
        WorkspaceError: the named folder is none, or there is none above this file.
    """
    if root is not None:
        return _checked(os.fspath(root), "workspace=")
    named = os.environ.get(WORKSPACE_VARIABLE)
    if named:
        return _checked(named, WORKSPACE_VARIABLE)
    folder = os.path.dirname(os.path.realpath(__file__))
    while folder != os.path.dirname(folder):
        if not _missing(folder):
            return Workspace(folder)
        folder = os.path.dirname(folder)
    raise WorkspaceError(
        f"there is no workspace to build environments from above {os.path.dirname(__file__)}; set "
        f"{WORKSPACE_VARIABLE} to the folder of a checkout that holds {LOCK} and {CONTAINER}/pyproject.toml"
    )


def _missing(folder: str) -> list[str]:
    wanted = (LOCK, os.path.join(CONTAINER, "pyproject.toml"))
    return [name for name in wanted if not os.path.isfile(os.path.join(folder, name))]


def _checked(given: str, source: str) -> Workspace:
    folder = os.path.realpath(os.path.expanduser(given))
    missing = _missing(folder)
    if missing:
        raise WorkspaceError(
            f"{source} names {folder}, which is no workspace: it lacks {' and '.join(missing)}; name the "
            f"folder of a checkout"
        )
    return Workspace(folder)
