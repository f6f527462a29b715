"""What an environment is made of, read from the lock: third-party packages and workspace members."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from .uv import Uv, other_torch_build_chosen
from .workspace import Project, Workspace

# Their wheels come in builds, or from indexes, other than the one whose hash a lock can hold.
TORCH = "torch"
TENSORRT_LLM = "tensorrt-llm"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Requirements(NamedTuple):
    """Pinned requirements of one environment.

    Attributes:
        packages: text of a requirements file; every entry has hashes.
        unhashed: entries that are pinned by version alone, such as ``torch==2.13.0``; their dependencies
            are not in ``packages`` but left to the build that is chosen.
        constraints: text of a constraints file with every pin but the unhashed ones.
        members: absolute paths of the workspace members, in order.
    """

    packages: str
    unhashed: tuple[str, ...]
    constraints: str
    members: tuple[str, ...]


def read_requirements(
    uv: Uv, workspace: Workspace, project: Project, selection: Sequence[str]
) -> Requirements:
    """Ask the lock what a selection is made of; needs no network and no source.

    Args:
        selection: uv's flags, such as ``("--extra", "mcore")``.

    Raises:
        BuildError: uv refuses, because the lock does not have the selection, say.
    """
    directory = workspace.path(os.path.dirname(project.lock))
    flags = ("export", "--quiet", "--frozen", "--package", project.name, "--no-header", "--no-annotate")
    entries = _entries(uv.run(*flags, *selection, cwd=directory))
    members = [entry for entry in entries if entry.startswith(("-e ", "./", "../"))]
    third_party = [entry for entry in entries if entry not in members]
    by_version = {TENSORRT_LLM, *([TORCH] if other_torch_build_chosen() else [])}
    unhashed = [entry for entry in third_party if _name(entry) in by_version]
    hashed = [entry for entry in third_party if entry not in unhashed]
    packages = hashed
    if unhashed:
        pruned = [flag for entry in unhashed for flag in ("--prune", _name(entry))]
        kept = set(_entries(uv.run(*flags, *selection, *pruned, cwd=directory)))
        packages = [entry for entry in hashed if entry in kept]
    return Requirements(
        packages=_text(packages),
        unhashed=tuple(_pin(entry) for entry in unhashed),
        constraints=_text(hashed),
        members=tuple(os.path.normpath(os.path.join(directory, _path(entry))) for entry in members),
    )


def _entries(export: str) -> list[str]:
    """The requirements of an export, each on one line."""
    return [line.strip() for line in export.replace("\\\n", " ").splitlines() if line.strip()]


def _text(entries: Sequence[str]) -> str:
    return "".join(f"{entry}\n" for entry in entries)


def _name(entry: str) -> str:
    found = _NAME.match(entry)
    return found.group().lower() if found else ""


def _pin(entry: str) -> str:
    """``NAME==VERSION ; MARKER`` without its hashes."""
    return entry.partition(" --hash=")[0].strip()


def _path(entry: str) -> str:
    return entry.removeprefix("-e ").partition(" ;")[0].strip()
