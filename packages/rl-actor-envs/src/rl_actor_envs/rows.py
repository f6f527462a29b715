"""The environments to build, as rows: from the table, or from the list that an image build wrote once."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from .errors import ActorEnvironmentError, UnknownActorError
from .registry import ActorRegistry
from .table import ACTOR_ENVIRONMENTS, DECLARED_EXTRAS, STAGES, build_rows, stage_of


class Row(NamedTuple):
    """An actor with an environment of its own.

    Attributes:
        actor: fully qualified class name.
        extras: in order.
    """

    actor: str
    extras: tuple[str, ...]

    @property
    def class_name(self) -> str:
        return self.actor.rpartition(".")[2]


def rows_of_table(*, stage: str = "all", skip: Collection[str] = ()) -> list[Row]:
    """The rows of this package's table.

    Raises:
        ActorEnvironmentError: an unknown stage or word to skip.
        UndeclaredExtraError: an actor asks for an extra that does not exist.
    """
    ActorRegistry()
    try:
        rows = build_rows(ACTOR_ENVIRONMENTS, stage=stage, skip=skip)
    except ValueError as error:
        raise ActorEnvironmentError(str(error)) from error
    return [_row("\t".join(row)) for row in rows]


def rows_of_file(path: str, *, stage: str = "all") -> list[Row]:
    """The rows of ``stage`` in a file that the table's script wrote.

    Raises:
        ActorEnvironmentError: an unknown stage, a file that cannot be read, is empty, or is not such a list.
    """
    if stage not in ("all", *STAGES):
        raise ActorEnvironmentError(f"unknown stage {stage!r}; use one of all, {', '.join(STAGES)}")
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ActorEnvironmentError(f"the list of environments {path} cannot be read: {error}") from error
    if not lines:
        raise ActorEnvironmentError(
            f"the list of environments {path} is empty: everything was skipped, or table.py failed"
        )
    rows = [_row(line) for line in lines]
    return [row for row in rows if stage in ("all", stage_of(row.extras))]


def only(rows: list[Row], actors: Collection[str]) -> list[Row]:
    """The rows of some actors; of all if none is named.

    Raises:
        UnknownActorError: one of them has no row.
    """
    for actor in actors:
        if actor not in {row.actor for row in rows}:
            raise UnknownActorError(
                f"actor {actor!r} is not among the environments to build: "
                f"{', '.join(row.actor for row in rows) or 'none'}",
                actor=actor,
            )
    return [row for row in rows if not actors or row.actor in actors]


def _row(line: str) -> Row:
    actor, _, rest = line.partition("\t")
    stage, _, flags = rest.partition("\t")
    words = flags.split()
    extras = tuple(words[1::2])
    wanted = [word for extra in extras for word in ("--extra", extra)]
    if not actor or words != wanted or stage != stage_of(extras) or not set(extras) <= set(DECLARED_EXTRAS):
        raise ActorEnvironmentError(
            f"{line!r} is no row of the table; write the list with `python table.py all > FILE`"
        )
    return Row(actor, extras)
