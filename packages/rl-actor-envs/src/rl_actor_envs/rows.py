"""The environments that a command is about: of the table, or of a file that the table's script wrote."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from .errors import ActorEnvironmentError, RowsError
from .registry import ActorRegistry
from .table import ACTOR_ENVIRONMENTS, build_rows, stage_of


def chosen_extras(
    rows: str | os.PathLike[str] | None = None,
    *,
    stage: str = "all",
    skip: Collection[str] = (),
    only: Collection[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Actor → extras of every environment to build, sorted by actor.

    Args:
        rows: file of rows as ``table.py`` prints them (``-``: standard input), by default the table itself.
        stage: ``all``, ``deps`` or ``trtllm``.
        skip: leave out environments with one of these extras.
        only: leave out environments of other actors than these, if any is named.

    Raises:
        RowsError: unknown stage, extra or actor, or a file that cannot be read, is empty, or holds something
            else.
    """
    table = ACTOR_ENVIRONMENTS if rows is None else read_rows(rows)
    try:
        registry = ActorRegistry(table)
        chosen = [actor for actor, _, _ in build_rows(table, stage=stage, skip=skip)]
    except (ActorEnvironmentError, ValueError) as error:
        raise RowsError(str(error)) from error
    for actor in only:
        if actor not in chosen:
            raise RowsError(
                f"{actor!r} has no environment of its own here; there are: {', '.join(chosen) or 'none'}"
            )
    return {actor: registry.extras_of(actor) or () for actor in chosen if not only or actor in only}


def read_rows(path: str | os.PathLike[str]) -> dict[str, list[str] | None]:
    """The table that a file of rows stands for.

    Raises:
        RowsError: it cannot be read, has no row, or a row is not of the form that ``table.py`` prints.
    """
    name = os.fspath(path)
    try:
        if name == "-":
            text = sys.stdin.read()
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read()
    except (OSError, ValueError) as error:
        raise RowsError(f"the rows in {name} cannot be read ({error})") from error
    table: dict[str, list[str] | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        actor, extras = _parsed(line, f"line {number} of {name}")
        if actor in table:
            raise RowsError(f"line {number} of {name} names {actor} again", actor=actor)
        table[actor] = extras
    if not table:
        raise RowsError(f"{name} holds no rows; what wrote it has failed, or skips every environment")
    return table


def _parsed(line: str, where: str) -> tuple[str, list[str]]:
    actor, *rest = line.split("\t")
    extras = rest[-1].split()[1::2] if rest else []
    if rest != [stage_of(extras), " ".join(f"--extra {extra}" for extra in extras)]:
        raise RowsError(f"{where} is {line!r}, which table.py does not print; write it with table.py")
    return actor, extras
