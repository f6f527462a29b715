"""The files of one checkpoint: manifest, verification, and getting them safely onto the disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; names the path and the remedy."""


class CheckpointCorruptError(CheckpointError):
    """Missing, half-written or damaged."""


class CheckpointFormatError(CheckpointError):
    """Complete, but of a format that this version cannot read."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as JSON; a number that is not finite is refused.

    Raises:
        CheckpointError: content that JSON cannot hold.
    """
    try:
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be written as JSON: {error}") from error
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CheckpointCorruptError: not there, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointCorruptError(f"{path} does not hold a JSON object")
    return content


def write_manifest(folder: Path, *, step: int, suffixes: Collection[str], score: float | None = None) -> None:
    """Flush every file and folder below ``folder`` to disk, then write and flush its manifest.

    ``score`` says how good the checkpoint is; ``None`` where nobody has measured.

    Raises:
        CheckpointError: nothing to store, or something that is not a regular file of an allowed type.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(_walk(folder)):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"checkpoint of step {step} holds {name}, which is not a regular file")
        if name == MANIFEST:
            raise CheckpointError(f"checkpoint of step {step}: the name {MANIFEST} belongs to the store")
        if path.suffix not in suffixes:
            allowed = ", ".join(sorted(suffixes))
            raise CheckpointError(f"checkpoint of step {step} holds {name}; only {allowed} files are stored")
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    if not files:
        raise CheckpointError(f"checkpoint of step {step} is empty: write its files before leaving the block")
    manifest = folder / MANIFEST
    content: dict[str, Any] = {"format": FORMAT, "step": step, "files": files}
    if score is not None:
        content["score"] = score
    write_json(manifest, content)
    with manifest.open("rb") as handle:
        os.fsync(handle.fileno())
    for directory, _, _ in os.walk(folder):
        fsync_directory(Path(directory))


def verify(folder: Path, *, hashes: bool = True) -> None:
    """Check ``folder`` against its manifest; without ``hashes`` by presence and size alone.

    Raises:
        CheckpointCorruptError: a file is missing or differs, or the manifest is no manifest.
        CheckpointFormatError: the manifest is of another format.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointFormatError(
            f"{folder} has checkpoint format {manifest.get('format')!r}, this version reads {FORMAT}: "
            "convert it with the version that wrote it, or start from another checkpoint"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not files or folder.name != f"step_{manifest.get('step')}":
        raise CheckpointCorruptError(f"{folder / MANIFEST} does not describe {folder.name}")
    for name, entry in files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not isinstance(entry, dict):
            raise CheckpointCorruptError(
                f"{folder / MANIFEST} names {name!r}, which is not inside the checkpoint"
            )
        path = folder / pure
        try:
            size = path.stat().st_size
            if size != entry.get("bytes"):
                raise CheckpointCorruptError(f"{path} has {size} bytes, expected {entry.get('bytes')}")
            if hashes and _sha256(path) != entry.get("sha256"):
                raise CheckpointCorruptError(f"{path} does not have the content that was written")
        except OSError as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error


def score_of(folder: Path) -> float | None:
    """What was said of the checkpoint in ``folder`` when it was written; ``None`` if nothing."""
    try:
        score = read_json(folder / MANIFEST).get("score")
    except CheckpointCorruptError:
        return None
    return float(score) if isinstance(score, (int, float)) and not isinstance(score, bool) else None


def fingerprint(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Name, size and time of change (ns) of every file below ``folder``: the same until one is written."""
    found = ((path.relative_to(folder).as_posix(), path.lstat()) for path in _walk(folder))
    return frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def fsync_directory(path: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _walk(folder: Path) -> Iterator[Path]:
    for directory, subfolders, names in os.walk(folder):
        for name in names:
            yield Path(directory, name)
        # os.walk lists links to folders among the folders and does not enter them
        for name in subfolders:
            if Path(directory, name).is_symlink():
                yield Path(directory, name)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
