"""What is really in an environment: uv succeeds, too, where a setting of yours sends its files elsewhere."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence

from .errors import BuildError


def check_packages(root: str) -> None:
    """There is at least one package in the environment at ``root``.

    Raises:
        BuildError: there is none.
    """
    if not _records(root):
        raise BuildError(f"uv installed nothing into {root}; {_REMEDY}")


def check_members(root: str, members: Sequence[str]) -> None:
    """Every member, given by its folder, is installed in the environment at ``root`` from that folder.

    Raises:
        BuildError: one is not; names the first.
    """
    present = {os.path.realpath(folder) for folder in map(_folder, _records(root)) if folder}
    for member in members:
        if os.path.realpath(member) not in present:
            raise BuildError(f"uv did not install {member} into {root}; {_REMEDY}")


def torch_version(root: str) -> str | None:
    """The version of torch in the environment at ``root``, with the name of its build."""
    for record in _records(root):
        name, _, version = os.path.basename(record).removesuffix(".dist-info").partition("-")
        if name == "torch":
            return version
    return None


_REMEDY = (
    "look for a target, prefix or python in your uv.toml, and take it out or name another UV_CONFIG_FILE"
)


def _records(root: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(root), "lib", "python*", "site-packages", "*.dist-info"))


def _folder(record: str) -> str | None:
    """The folder that a distribution was installed from, if it was one."""
    from urllib.parse import unquote, urlsplit

    try:
        with open(os.path.join(record, "direct_url.json"), encoding="utf-8") as file:
            return unquote(urlsplit(json.load(file)["url"]).path)
    except (OSError, ValueError, LookupError, TypeError):
        return None
