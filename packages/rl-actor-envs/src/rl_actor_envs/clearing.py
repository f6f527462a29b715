"""Empties the directory of an environment before it is built, if it is one of ours."""

from __future__ import annotations

import os
from collections.abc import Callable

from .errors import BuildError


def clear(root: str, *, is_ours: Callable[[], bool], mark: Callable[[], object], marker: str) -> None:
    """Leave a directory with nothing but the mark of a builder at work.

    Args:
        root: the directory; it is made when it is not there.
        is_ours: whether what lies there was built here, finished or not; asked only if something lies there.
        mark: writes the mark of a builder at work.
        marker: name of that mark.

    Raises:
        BuildError: it holds something else than an environment of ours.
    """
    import shutil

    held = os.listdir(root) if os.path.lexists(root) else []
    if held and not is_ours():
        raise BuildError(
            f"{root} exists and was not built here, so it is not replaced; move it away or choose "
            f"another place"
        )
    os.makedirs(root, exist_ok=True)
    # First the mark, then the removal: what a kill in between leaves is still known as ours.
    mark()
    for name in held:
        path = os.path.join(root, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif name != marker:
            os.unlink(path)
