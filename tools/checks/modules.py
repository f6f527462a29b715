"""Modules stay small and have a name that says what they are for."""

from __future__ import annotations

from pathlib import Path

from tools.checks.files import workspace_files

MOST_LINES = 400
_NAMELESS = {"utils", "util", "helpers", "helper", "misc", "common"}


def oversized(root: Path) -> list[str]:
    """Return one complaint for each module of `src/` folders or `tools/` with more than MOST_LINES lines."""
    complaints = []
    for file in _modules(root):
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            complaints.append(
                f"{file.relative_to(root)} has {lines} lines; split it by meaning at {MOST_LINES}"
            )
    return complaints


def nameless(root: Path) -> list[str]:
    """Return one complaint for each module whose name says nothing (utils, helpers, …)."""
    return [
        f"{file.relative_to(root)}: name it after what it is for"
        for file in _modules(root)
        if file.stem.strip("_") in _NAMELESS or file.parent.name in _NAMELESS
    ]


def _modules(root: Path) -> list[Path]:
    return [
        file
        for file in workspace_files(root)
        if file.suffix == ".py" and {"src", "tools"} & set(file.relative_to(root).parts[:-1])
    ]
