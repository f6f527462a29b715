"""Builds a list of environments one after another, and says of each how it went."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from .builder import build_environment
from .environment import DRIVER, Environment, actor_environment, driver_environment
from .errors import ActorEnvironmentError
from .workspace import Workspace


def prefetch(table: Mapping[str, Sequence[str]], workspace: Workspace, phase: str = "all") -> list[str]:
    """Build the environment of every actor of ``table`` that is not there, with a line of progress each.

    One that fails does not keep the others from being built.

    Args:
        table: fully qualified class → extras in order.
        workspace: what they are built from.
        phase: as :func:`rl_actor_envs.builder.build_environment` takes it.

    Returns:
        The actors whose environments could not be built, in order.
    """
    failed = []
    for number, (actor, extras) in enumerate(table.items(), 1):
        said = f"[{number}/{len(table)}] {actor} ({', '.join(extras) or 'no extras'})"
        if not _built(said, lambda a=actor, e=extras: actor_environment(a, e, workspace), phase):
            failed.append(actor)
    if failed:
        sys.stderr.write(f"{len(failed)} of {len(table)} environments not built: {', '.join(failed)}\n")
    return failed


def prefetch_driver(directory: str, workspace: Workspace, phase: str = "all") -> bool:
    """Build the driver's environment at ``directory``; returns whether it is there now."""
    return _built(DRIVER, lambda: driver_environment(directory, workspace), phase)


def _built(name: str, environment: Callable[[], Environment], phase: str) -> bool:
    _say(f"{name} … ")
    start = time.monotonic()
    try:
        built = build_environment(environment(), phase)
    except ActorEnvironmentError as error:
        _say(f"FAILED: {error}\n")
        return False
    _say(f"built in {time.monotonic() - start:.0f} s\n" if built else "already built\n")
    return True


def _say(words: str) -> None:
    # A build takes minutes, and what it says is read meanwhile.
    sys.stdout.write(words)
    sys.stdout.flush()
