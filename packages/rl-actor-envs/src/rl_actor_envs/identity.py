"""The name of an environment, from everything that decides what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence

from .errors import ActorEnvironmentError

LOCK_VARIABLE = "RL_ACTOR_ENVS_LOCK"


def environment_name(*, actor: str, extras: Sequence[str], lock: str, python: str) -> str:
    """``<class>-<16 hex digits>``: a change of any argument gives another name.

    Args:
        actor: fully qualified class name.
        extras: in order.
        lock: hash of the lock file's content, as :func:`lock_hash` gives it.
        python: which Python, as :func:`python_tag` writes it.
    """
    facts = json.dumps([actor, list(extras), lock, python]).encode("ascii")
    return f"{actor.rpartition('.')[2]}-{hashlib.sha256(facts).hexdigest()[:16]}"


def python_tag() -> str:
    """The running Python, such as ``cpython-3.11.7``."""
    version = sys.version_info
    return f"{sys.implementation.name}-{version.major}.{version.minor}.{version.micro}"


def lock_hash(lock: str | os.PathLike[str] | None = None) -> str:
    """SHA-256 of a lock file's content.

    Args:
        lock: its path; ``None`` takes the path in the variable ``RL_ACTOR_ENVS_LOCK``.

    Raises:
        ActorEnvironmentError: there is neither, or the file cannot be read.
    """
    path = os.environ.get(LOCK_VARIABLE) if lock is None else os.fspath(lock)
    if not path:
        raise ActorEnvironmentError(
            f"which lock file the actors' environments are built from is not known; pass lock=, or set "
            f"{LOCK_VARIABLE} to the path of uv.lock"
        )
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        raise ActorEnvironmentError(
            f"the lock file {path} cannot be read ({error.strerror or error}); pass lock=, or set "
            f"{LOCK_VARIABLE} to the path of uv.lock"
        ) from error
