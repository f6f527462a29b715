"""The name of an environment, from everything that decides what is in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .errors import WorkspaceError


def environment_name(*, actor: str, extras: Sequence[str], lock: str, python: str, workspace: str) -> str:
    """``<class>-<16 hex digits>``: a change of any argument gives another name.

    Args:
        actor: fully qualified class name.
        extras: in order.
        lock: hash of the lock file's content, as :func:`lock_hash` gives it.
        python: which Python, as :func:`python_tag` writes it.
        workspace: root of the workspace, whose members are installed editable.
    """
    import hashlib
    import json

    facts = json.dumps([actor, list(extras), lock, python, workspace]).encode("ascii")
    return f"{actor.rpartition('.')[2]}-{hashlib.sha256(facts).hexdigest()[:16]}"


def python_tag() -> str:
    """The running Python, such as ``cpython-3.11.7``."""
    version = sys.version_info
    return f"{sys.implementation.name}-{version.major}.{version.minor}.{version.micro}"


def lock_hash(lock: str | os.PathLike[str]) -> str:
    """SHA-256 of a lock file's content, in hex.

    Raises:
        WorkspaceError: the file cannot be read.
    """
    try:
        return content_hash(lock)
    except OSError as error:
        raise WorkspaceError(
            f"the lock file {os.fspath(lock)} cannot be read ({error.strerror or error}); environments are "
            f"built from it: restore it, or write it with `hatch run lock`"
        ) from error


def content_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's content, in hex.

    Raises:
        OSError: it cannot be read.
    """
    import hashlib

    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
