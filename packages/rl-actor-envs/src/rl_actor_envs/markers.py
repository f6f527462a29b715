"""What says that an environment is complete: a file written last, with the facts it was built from."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .identity import EnvironmentSpec

DEPENDENCIES = "dependencies.json"
ENVIRONMENT = "environment.json"


def is_marked(spec: EnvironmentSpec, marker: str) -> bool:
    """Whether the environment exists and holds ``marker`` with exactly the facts of ``spec``."""
    import json

    try:
        with open(os.path.join(spec.root, marker), encoding="utf-8") as file:
            written = json.load(file)
    except (OSError, ValueError):
        return False
    known = isinstance(written, dict) and all(
        written.get(key) == value for key, value in _facts(spec).items()
    )
    return known and os.path.isfile(spec.interpreter)


def write_marker(spec: EnvironmentSpec, marker: str, details: Mapping[str, str]) -> None:
    """Publish ``marker``: it appears whole, after everything written before it, or not at all."""
    import json

    path = os.path.join(spec.root, marker)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump({**_facts(spec), **details}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
    directory = os.open(spec.root, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _facts(spec: EnvironmentSpec) -> dict[str, object]:
    return {
        "actor": spec.actor,
        "extras": list(spec.extras),
        "lock": spec.lock,
        "python": spec.python,
        "workspace": spec.workspace,
    }
