"""Which environment an actor has, from everything that decides what is in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from .errors import WorkspaceError
from .workspace import Workspace, project_of


class EnvironmentSpec(NamedTuple):
    """One environment: what it is made of, and where it is.

    Attributes:
        actor: fully qualified class name.
        extras: of the container's project, in order.
        lock: SHA-256 of the lock's content.
        python: such as ``cpython-3.11.7``.
        workspace: root that its members are installed from, editable.
        root: absolute path of the virtual environment; its name is a hash of all of the above.
    """

    actor: str
    extras: tuple[str, ...]
    lock: str
    python: str
    workspace: str
    root: str

    @property
    def interpreter(self) -> str:
        return os.path.join(self.root, "bin", "python")


def environment_of(
    actor: str, extras: Sequence[str], workspace: Workspace, *, python: str | None = None
) -> EnvironmentSpec:
    """The environment of an actor, whether it exists or not.

    Args:
        actor: fully qualified class name.
        extras: in order.
        workspace: what it is built from.
        python: which Python, as :func:`python_tag` writes it; by default the running one.

    Raises:
        WorkspaceError: the lock cannot be read.
    """
    lock = file_digest(workspace.path(project_of(extras).lock))
    tag = python or python_tag()
    name = environment_name(actor=actor, extras=extras, lock=lock, python=tag, workspace=workspace.root)
    root = os.path.join(workspace.environments, name)
    return EnvironmentSpec(actor, tuple(extras), lock, tag, workspace.root, root)


def environment_name(*, actor: str, extras: Sequence[str], lock: str, python: str, workspace: str) -> str:
    """``<class>-<16 hex digits>``: a change of any argument gives another name.

    The workspace counts because its members are installed editable: two checkouts that shared an
    environment would run each other's code.
    """
    import hashlib
    import json

    facts = json.dumps([actor, list(extras), lock, python, workspace]).encode("ascii")
    return f"{actor.rpartition('.')[2]}-{hashlib.sha256(facts).hexdigest()[:16]}"


def python_tag() -> str:
    """The running Python, such as ``cpython-3.11.7``."""
    version = sys.version_info
    return f"{sys.implementation.name}-{version.major}.{version.minor}.{version.micro}"


def file_digest(path: str) -> str:
    """SHA-256 of a file of the workspace, in hex.

    Raises:
        WorkspaceError: it cannot be read.
    """
    import hashlib

    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        raise WorkspaceError(
            f"{path} cannot be read ({error.strerror or error}); the workspace is incomplete"
        ) from error
