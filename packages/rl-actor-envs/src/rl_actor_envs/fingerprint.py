"""Whether environments are still those that the present locks, declarations and table describe."""

from __future__ import annotations

import os
from typing import NamedTuple

from . import table
from .errors import ActorEnvironmentError, FingerprintMismatchError
from .identity import content_hash
from .workspace import CONTAINER, LOCK, SEPARATE_EXTRA, Workspace, find_workspace

FINGERPRINT_VARIABLE = "RL_ACTOR_ENVS_FINGERPRINT"
IGNORE_VARIABLE = "RL_ACTOR_ENVS_IGNORE_FINGERPRINT"

_TABLE = "rl_actor_envs/table.py"


class Fingerprint(NamedTuple):
    """SHA-256, in hex, of everything that environments are made from.

    Attributes:
        files: name → hash of its content.
        digest: one hash over all names and hashes.
    """

    files: dict[str, str]
    digest: str

    def to_json(self) -> str:
        """As text that :func:`read_fingerprint` reads; the same fingerprint gives the same text."""
        import json

        return json.dumps({"digest": self.digest, "files": self.files}, indent=2, sort_keys=True) + "\n"


def fingerprint(workspace: str | os.PathLike[str] | None = None) -> Fingerprint:
    """Of the locks and the container's declarations of a workspace, and of the table that this process uses.

    Args:
        workspace: its root; see :func:`rl_actor_envs.workspace.find_workspace`.

    Raises:
        WorkspaceError: there is no workspace.
        ActorEnvironmentError: a file cannot be read.
    """
    return _combined({name: _hash(path) for name, path in _sources(find_workspace(workspace)).items()})


def read_fingerprint(path: str | os.PathLike[str]) -> Fingerprint:
    """A recorded fingerprint.

    Raises:
        FingerprintMismatchError: the file cannot be read or is none.
    """
    import json

    try:
        with open(path, encoding="utf-8") as file:
            recorded = json.load(file)
        files = {str(name): str(value) for name, value in recorded["files"].items()}
        if _combined(files).digest != recorded["digest"]:
            raise ValueError("its digest does not belong to its files")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FingerprintMismatchError(
            f"the recorded fingerprint {os.fspath(path)} cannot be read ({error}); write it again with "
            f"`python -m rl_actor_envs fingerprint --write FILE` where the environments are built, or unset "
            f"{FINGERPRINT_VARIABLE}"
        ) from error
    return _combined(files)


def write_fingerprint(path: str | os.PathLike[str], workspace: str | os.PathLike[str] | None = None) -> None:
    """Record the present fingerprint in a file.

    Raises:
        ActorEnvironmentError: it cannot be taken or written.
    """
    text = fingerprint(workspace).to_json()
    temporary = f"{os.fspath(path)}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise ActorEnvironmentError(f"{os.fspath(path)} cannot be written ({error})") from error


def check_fingerprint(
    recorded: str | os.PathLike[str] | None = None, workspace: str | os.PathLike[str] | None = None
) -> None:
    """Compare the present fingerprint with the recorded one.

    Args:
        recorded: file with it, which is then compared whatever the variables say; by default the one that
            ``RL_ACTOR_ENVS_FINGERPRINT`` names, and where that is unset there is nothing to compare.
        workspace: whose fingerprint to take.

    Raises:
        FingerprintMismatchError: they differ, or the recorded one cannot be read, unless
            ``RL_ACTOR_ENVS_IGNORE_FINGERPRINT`` is exactly ``1``.
        WorkspaceError: there is no workspace.
    """
    path = recorded
    if path is None:
        path = os.environ.get(FINGERPRINT_VARIABLE)
        if not path or os.environ.get(IGNORE_VARIABLE) == "1":
            return
    was, now = read_fingerprint(path), fingerprint(workspace)
    if was.digest == now.digest:
        return
    differing = [
        f"{name} ({_change(was.files.get(name), now.files.get(name))})"
        for name in sorted({*was.files, *now.files})
        if was.files.get(name) != now.files.get(name)
    ]
    raise FingerprintMismatchError(
        f"the environments here were built from something else than what is here now: {', '.join(differing)} "
        f"against {os.fspath(path)}; rebuild the image (or prefetch and record the fingerprint again), or go "
        f"back to the sources that it was built from, or, knowing that workers may run other versions, set "
        f"{IGNORE_VARIABLE}=1"
    )


def _sources(workspace: Workspace) -> dict[str, str]:
    """Name → path of every file that counts."""
    separate = os.path.join(CONTAINER, SEPARATE_EXTRA)
    always = (LOCK, os.path.join(CONTAINER, "pyproject.toml"))
    optional = (os.path.join(separate, LOCK), os.path.join(separate, "pyproject.toml"))
    paths = {name: os.path.join(workspace.root, name) for name in (*always, *optional)}
    sources = {name: path for name, path in paths.items() if name in always or os.path.exists(path)}
    sources[_TABLE] = os.path.abspath(table.__file__)
    return sources


def _hash(path: str) -> str:
    try:
        return content_hash(path)
    except OSError as error:
        raise ActorEnvironmentError(f"{path}, a part of the fingerprint, cannot be read ({error})") from error


def _combined(files: dict[str, str]) -> Fingerprint:
    import hashlib
    import json

    facts = json.dumps(sorted(files.items())).encode("ascii")
    return Fingerprint(files, hashlib.sha256(facts).hexdigest())


def _change(was: str | None, now: str | None) -> str:
    if was is None:
        return "new"
    return "gone" if now is None else "changed"
