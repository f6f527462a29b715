"""Whether environments that were built elsewhere, in an image, say, still fit this workspace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from .errors import ActorEnvironmentError, FingerprintMismatchError
from .identity import file_digest
from .workspace import Workspace, find_workspace, fingerprinted_files

FINGERPRINT_VARIABLE = "RL_ACTOR_ENVS_FINGERPRINT"
IGNORE_FLAG = "RL_ACTOR_ENVS_IGNORE_FINGERPRINT"


class Fingerprint(NamedTuple):
    """Digests of everything that decides what is in the environments.

    Attributes:
        files: path below the workspace's root → SHA-256 of its content, in hex.
        digest: SHA-256 of all of them.
    """

    files: Mapping[str, str]
    digest: str

    def to_json(self) -> str:
        """The form in which it is written beside an image's environments."""
        import json

        return json.dumps({"digest": self.digest, "files": dict(self.files)}, indent=1) + "\n"


def fingerprint(workspace: Workspace | None = None) -> Fingerprint:
    """Of the lock(s), the container's declarations and the table.

    Args:
        workspace: whose; by default the one that :func:`~rl_actor_envs.workspace.find_workspace` finds.

    Raises:
        WorkspaceError: there is no workspace, or one of the files is missing.
    """
    place = workspace or find_workspace()
    return _of({name: file_digest(place.path(name)) for name in fingerprinted_files(place)})


def read_fingerprint(path: str) -> Fingerprint:
    """The fingerprint in a file that :meth:`Fingerprint.to_json` wrote.

    Raises:
        ActorEnvironmentError: it cannot be read or is not one.
    """
    import json

    try:
        with open(path, encoding="utf-8") as file:
            written = json.load(file)
        found = _of({str(name): str(digest) for name, digest in written["files"].items()})
        if found.digest != written["digest"]:
            raise ValueError("its digest is not that of its files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ActorEnvironmentError(
            f"the fingerprint {path} cannot be read ({type(error).__name__}: {error}); correct "
            f"{FINGERPRINT_VARIABLE}, or write it anew with `rl-actor-envs fingerprint --write`"
        ) from error
    return found


def check_fingerprint(workspace: Workspace | None = None, *, path: str | None = None) -> None:
    """Refuse to run with environments that were built from something else.

    Args:
        workspace: what runs now.
        path: of the fingerprint to compare with; by default the file that ``RL_ACTOR_ENVS_FINGERPRINT``
            names, and nothing is compared if that is unset. Images set it.

    Raises:
        FingerprintMismatchError: they differ, and ``RL_ACTOR_ENVS_IGNORE_FINGERPRINT`` is not exactly ``1``.
        ActorEnvironmentError: the file cannot be read.
    """
    recorded_at = path or os.environ.get(FINGERPRINT_VARIABLE)
    if not recorded_at or os.environ.get(IGNORE_FLAG) == "1":
        return
    place = workspace or find_workspace()
    recorded, present = read_fingerprint(recorded_at).files, fingerprint(place).files
    differing = sorted(
        name for name in recorded.keys() | present.keys() if recorded.get(name) != present.get(name)
    )
    if differing:
        raise FingerprintMismatchError(
            f"the environments recorded in {recorded_at} were built from other files than those of "
            f"{place.root}: {', '.join(differing)} differ; build the image or the environments anew, run the "
            f"source that they were built from, or set {IGNORE_FLAG}=1 if you know that they still fit"
        )


def _of(files: Mapping[str, str]) -> Fingerprint:
    import hashlib

    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return Fingerprint(dict(files), hashlib.sha256(text.encode()).hexdigest())
