"""The generating half of a step: draw rows, play them, and draw again where groups taught nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_gym_bridge.trajectory import RolloutFailure, Trajectory

from ..protocols import RolloutSource
from .rows import rows_at
from .samples import check_rollouts, judge
from .settings import LoopSettings
from .state import LoopError

_Rollout = Trajectory | RolloutFailure


class DynamicSamplingError(LoopError):
    """Too few groups could be told apart in as many rounds as a step may take."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The rollouts of one step.

    Attributes:
        rollouts: what the step learns from; groups contiguous.
        rows_drawn: rows that were played for it.
        rounds: how often it generated.
        flat: groups left out because their rewards are all equal, by dynamic sampling.
        surplus: groups left out because the step was full.
        left_out: the rollouts of both.
    """

    rollouts: list[_Rollout]
    rows_drawn: int
    rounds: int = 1
    flat: int = 0
    surplus: int = 0
    left_out: tuple[_Rollout, ...] = ()

    def metrics(self) -> dict[str, float]:
        return {
            "generation_rounds": float(self.rounds),
            "flat_groups_left_out": float(self.flat),
            "surplus_groups_left_out": float(self.surplus),
        }


def collect(
    source: RolloutSource,
    rows: Sequence[Any],
    settings: LoopSettings,
    *,
    position: int,
    step: int,
    should_stop: Callable[[], bool],
) -> Collected | None:
    """The rollouts of ``step``, from the rows after the first ``position`` ones; ``None`` on a stop.

    With ``dynamic_sampling`` groups whose *unshaped* rewards are all equal are left out and further rows
    drawn, about as many as the share of useful groups so far makes likely to be enough, until
    ``prompts_per_step`` groups are found. What was drawn depends on rows and rollouts alone, so a repeated
    step draws the same.

    Raises:
        LoopError: rollouts that break the contract of their source.
        DynamicSamplingError: too few useful groups after ``max_generation_rounds`` rounds.

    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.
    """
    wanted, size = settings.prompts_per_step, settings.group_size
    useful: list[list[_Rollout]] = []
    flat: list[list[_Rollout]] = []
    drawn, rounds = 0, 0
    while True:
        count = _next_draw(wanted, found=len(useful), drawn=drawn)
        chosen = rows_at(position + drawn, count, row_count=len(rows), seed=settings.seed)
        rollouts = source.rollouts([rows[i] for i in chosen], group_size=size, step=step, first=drawn)
        if should_stop():
            return None
        check_rollouts(rollouts, row_count=count, group_size=size, step=step)
        drawn, rounds = drawn + count, rounds + 1
        if not settings.dynamic_sampling:
            return Collected(rollouts, drawn)
        alike = judge(rollouts, settings, step).zero_spread
        for start in range(0, len(rollouts), size):
            group = rollouts[start : start + size]
            told_apart = group[0].group_id not in alike and any(isinstance(r, Trajectory) for r in group)
            (useful if told_apart else flat).append(group)
        if len(useful) >= wanted:
            break
        if rounds == settings.max_generation_rounds:
            raise DynamicSamplingError(
                f"step {step}: {len(useful)} of {drawn} groups have rewards that differ, and {wanted} were "
                f"wanted within max_generation_rounds {rounds}; the rows are too easy or too hard for the "
                "policy: choose others, raise the limit or group_size, or turn dynamic_sampling off"
            )
    return Collected(
        [r for group in useful[:wanted] for r in group],
        drawn,
        rounds=rounds,
        flat=len(flat),
        surplus=len(useful) - wanted,
        left_out=tuple(r for group in (*flat, *useful[wanted:]) for r in group),
    )


def _next_draw(wanted: int, *, found: int, drawn: int) -> int:
    if not drawn:
        return wanted
    share = max(found, 1) / drawn
    return min(wanted, math.ceil((wanted - found) / share))
