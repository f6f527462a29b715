"""Commands ``python-<ActorClass>`` that start an environment's interpreter by hand."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from .errors import ActorEnvironmentError
from .identity import environment_of
from .rows import Row
from .workspace import Workspace


def write_wrappers(
    directory: str, rows: Sequence[Row], workspace: Workspace, *, python_tag: str | None = None
) -> list[str]:
    """Write one executable per row into ``directory``; return their paths in order.

    Raises:
        ActorEnvironmentError: two actors have classes of one name.
    """
    classes: dict[str, str] = {}
    for row in rows:
        if row.class_name in classes:
            raise ActorEnvironmentError(
                f"{classes[row.class_name]} and {row.actor} would both be python-{row.class_name}; "
                f"rename one of the classes"
            )
        classes[row.class_name] = row.actor
    os.makedirs(directory, exist_ok=True)
    written = []
    for row in rows:
        spec = environment_of(row.actor, row.extras, workspace, python=python_tag)
        path = os.path.join(directory, f"python-{row.class_name}")
        root = shlex.quote(spec.root)
        lines = [
            "#!/bin/sh",
            f"# The environment of {row.actor}.",
            f"export VIRTUAL_ENV={root} UV_PROJECT_ENVIRONMENT={root}",
            f'exec {shlex.quote(spec.interpreter)} "$@"',
        ]
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        os.chmod(path, 0o755)
        written.append(path)
    return written
