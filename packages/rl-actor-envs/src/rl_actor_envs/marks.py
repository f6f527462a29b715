"""Files in an environment that say how far it is: each is there completely, or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping


def read_mark(root: str, marker: str) -> dict[str, object]:
    """What a mark says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no record.
    """
    import json

    with open(os.path.join(root, marker), encoding="utf-8") as file:
        recorded = json.load(file)
    if not isinstance(recorded, dict):
        raise ValueError("it holds no record")
    return recorded


def is_unfinished_mark(name: str, markers: Collection[str]) -> bool:
    """Whether a file has the name that a mark has until it is written; a builder that is killed leaves it."""
    marker, _, writer = name.rpartition(".")
    return marker in markers and writer.isdecimal()


def write_mark(root: str, marker: str, record: Mapping[str, object]) -> None:
    """Write a mark so that it survives a crash of the machine once this has returned.

    Raises:
        OSError: it cannot be written.
    """
    import json

    path = os.path.join(root, marker)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(root, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
