"""Builds many environments one after another; one that fails does not keep the others from being built."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .builder import Phase, ensure_environment
from .errors import ActorEnvironmentError
from .identity import environment_of
from .rows import Row
from .workspace import Workspace


def prefetch(
    rows: Sequence[Row],
    workspace: Workspace,
    *,
    phase: Phase = "all",
    python: str | None = None,
    python_tag: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Build the environments of ``rows`` that are not there yet.

    Args:
        rows: which.
        workspace: what they are built from.
        phase: see :func:`~rl_actor_envs.builder.ensure_environment`.
        python: path of the interpreter to build them with, by default the running one's kind.
        python_tag: its kind.
        say: told a line of progress when one begins and when it ends.

    Returns:
        The actors whose environment could not be built, in order.
    """
    failed = []
    for number, row in enumerate(rows, 1):
        what = f"[{number}/{len(rows)}] {row.actor} ({', '.join(row.extras) or 'no extras'})"
        say(f"{what}: building")
        began = time.monotonic()
        try:
            spec = environment_of(row.actor, row.extras, workspace, python=python_tag)
            built = ensure_environment(spec, workspace, phase=phase, python=python)
        except ActorEnvironmentError as error:
            failed.append(row.actor)
            say(f"{what}: FAILED: {error}")
            continue
        result = f"built in {time.monotonic() - began:.0f} s" if built else "already built"
        say(f"{what}: {result}, {spec.root}")
    return failed
