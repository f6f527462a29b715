"""Which files belong to the workspace."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

_GENERATED = {".git", ".hatch", ".venv", ".venv-vllm", "__pycache__", "dist", "runs"}


def workspace_files(root: Path) -> list[Path]:
    """Return the files that git tracks or would track, or in a tree without git all but generated ones."""
    if not (root / ".git").exists():
        return sorted(file for file in _walk(root) if file.is_file())
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    files = (root / name for name in listed.split("\0") if name)
    return sorted(file for file in files if file.is_file())


def text_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path relative to `root`, text) of every workspace file that is UTF-8 text."""
    for file in workspace_files(root):
        try:
            yield file.relative_to(root), file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in _GENERATED:
                yield from _walk(entry)
        else:
            yield entry
