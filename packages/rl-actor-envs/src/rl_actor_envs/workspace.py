"""The workspace that environments are built from: a checkout, or its copy in an image."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from .errors import WorkspaceError

WORKSPACE_VARIABLE = "RL_ACTOR_ENVS_WORKSPACE"
DIRECTORY_VARIABLE = "RL_ACTOR_ENVS_DIR"

_CONTAINER = os.path.join("apps", "container")
_TRTLLM = os.path.join(_CONTAINER, "trtllm")
# The leaf itself carries them, so that a checkout is recognised whatever else is in it.
_MARKS = ("uv.lock", os.path.join(_CONTAINER, "pyproject.toml"))


class Project(NamedTuple):
    """A uv project whose extras are worker environments.

    Attributes:
        name: of its package.
        directory: below the workspace's root; its ``uv.lock`` is there or above.
        lock: path of its lock, below the root.
    """

    name: str
    directory: str
    lock: str


_MAIN = Project("rl-app-container", _CONTAINER, "uv.lock")
_TRTLLM_PROJECT = Project("rl-app-container-trtllm", _TRTLLM, os.path.join(_TRTLLM, "uv.lock"))


class Workspace(NamedTuple):
    """A workspace root.

    Attributes:
        root: absolute path.
    """

    root: str

    def path(self, *parts: str) -> str:
        """A path below the root."""
        return os.path.join(self.root, *parts)

    @property
    def environments(self) -> str:
        """Absolute path of the directory that holds the environments; it need not exist."""
        chosen = os.environ.get(DIRECTORY_VARIABLE)
        return os.path.abspath(os.path.expanduser(chosen)) if chosen else self.path(".actor-envs")


def project_of(extras: Sequence[str]) -> Project:
    """The project that declares ``extras``: TensorRT-LLM has one, and a lock, of its own."""
    return _TRTLLM_PROJECT if "trtllm" in extras else _MAIN


def fingerprinted_files(workspace: Workspace) -> tuple[str, ...]:
    """What decides the content of every environment, as paths below the root.

    A workspace without TensorRT-LLM's project does not have its files.
    """
    table = os.path.join("packages", "rl-actor-envs", "src", "rl_actor_envs", "table.py")
    optional = (_TRTLLM_PROJECT.lock, os.path.join(_TRTLLM_PROJECT.directory, "pyproject.toml"))
    return (
        _MAIN.lock,
        os.path.join(_MAIN.directory, "pyproject.toml"),
        *(name for name in optional if os.path.isfile(workspace.path(name))),
        table,
    )


def find_workspace(root: str | os.PathLike[str] | None = None) -> Workspace:
    """The workspace at ``root``, else at ``RL_ACTOR_ENVS_WORKSPACE``, else the checkout this file lies in.

    Raises:
        WorkspaceError: there is none, or the one that was named has no lock or no container.
    """
    named = os.fspath(root) if root is not None else os.environ.get(WORKSPACE_VARIABLE)
    if named:
        path = os.path.realpath(os.path.expanduser(named))
        for mark in _MARKS:
            if not os.path.isfile(os.path.join(path, mark)):
                raise WorkspaceError(
                    f"{path} is not a workspace: {mark} does not exist; pass workspace=, or set "
                    f"{WORKSPACE_VARIABLE}, to the root of a checkout"
                )
        return Workspace(path)
    here = os.path.realpath(__file__)
    while (parent := os.path.dirname(here)) != here:
        here = parent
        if all(os.path.isfile(os.path.join(here, mark)) for mark in _MARKS):
            return Workspace(here)
    raise WorkspaceError(
        f"which workspace the actors' environments are built from is not known; pass workspace=, or set "
        f"{WORKSPACE_VARIABLE} to the root of a checkout"
    )
