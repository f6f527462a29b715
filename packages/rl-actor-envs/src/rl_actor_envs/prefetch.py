"""Builds a list of environments one after another, and says of each how it went."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .builder import build_environment
from .environment import Environment, actor_environment, driver_environment
from .errors import ActorEnvironmentError
from .workspace import Workspace


class Outcome(NamedTuple):
    """How a list of environments went.

    Attributes:
        failed: the actors whose environments are not there, in order.
    """

    failed: tuple[str, ...]


def prefetch(table: Mapping[str, Sequence[str]], workspace: Workspace, phase: str = "all") -> Outcome:
    """Build the environment of every actor of ``table``, with a line of progress each.

    A failing one does not keep the others from being built.
    """
    return _build_all([actor_environment(*row, workspace) for row in table.items()], phase)


def prefetch_driver(directory: str, workspace: Workspace, phase: str = "all") -> Outcome:
    """Build the driver's environment at ``directory``."""
    return _build_all([driver_environment(directory, workspace)], phase)


def _build_all(environments: Sequence[Environment], phase: str) -> Outcome:
    failed = []
    for number, environment in enumerate(environments, 1):
        extras = ", ".join(environment.extras) or "no extras"
        _say(f"[{number}/{len(environments)}] {environment.actor} ({extras}) … ")
        start = time.monotonic()
        try:
            built = build_environment(environment, phase)
        except ActorEnvironmentError as error:
            _say(f"FAILED: {error}\n")
            failed.append(environment.actor)
        else:
            _say(f"built in {time.monotonic() - start:.0f} s\n" if built else "already built\n")
    if failed:
        sys.stderr.write(f"{len(failed)} of {len(environments)} not built: {', '.join(failed)}\n")
    return Outcome(tuple(failed))


def _say(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()
