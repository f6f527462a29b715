"""What a rollout's reward loses for faults of form and for thinking beyond its budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .config import EffortLevel, RewardPenalties
from .failures import GymConfigError, GymRewardError
from .trajectory import Trajectory

ENVIRONMENT = "environment"
PREFIX = "penalty/"
#: Metric with the reward before penalties; filters that ask whether a group agrees should look at this one.
RAW_REWARD = "reward/environment"


class PenaltyTaker:
    """Takes a run's penalties, once from each trajectory: whoever makes the trajectories owns one.

    Args:
        penalties: for faults of form.
        effort_levels: with their budgets.
    """

    def __init__(self, penalties: RewardPenalties, effort_levels: Iterable[EffortLevel]) -> None:
        self._penalties = penalties
        self._efforts = {level.name: level for level in effort_levels}

    def taken(self, trajectory: Trajectory, effort: str) -> Trajectory:
        """The trajectory after :func:`apply_penalties`, by the level of that name (empty for none).

        Raises:
            GymConfigError: the level is not among those given here, so nobody knows what it costs.
            GymRewardError: see :func:`apply_penalties`.
        """
        if effort and effort not in self._efforts:
            known = ", ".join(self._efforts) or "no levels"
            raise GymConfigError(
                f"the request asks for {effort!r}, which is none of {known}",
                component="effort_levels",
                remedy="give the runner the same levels as the requests",
            )
        return apply_penalties(trajectory, self._penalties, self._efforts.get(effort))


def apply_penalties(
    trajectory: Trajectory, penalties: RewardPenalties, effort: EffortLevel | None = None
) -> Trajectory:
    """The trajectory with the penalties in its reward and named among the reward's components.

    The components are the environment's own, or ``environment`` where it names none, and one ``penalty/…``
    for each kind that cost something; they sum to the new reward. The metric ``reward/environment`` keeps
    the old one. A trajectory without a reward stays without.

    Raises:
        GymRewardError: the environment itself names a component ``penalty/…``.
    """
    if trajectory.reward is None:
        return trajectory
    taken = _costs(trajectory, penalties, effort)
    clash = sorted(set(taken) & set(trajectory.reward_components))
    if clash:
        raise GymRewardError(
            f"the environment names the reward components {clash}, which are the bridge's",
            remedy="rename them",
        )
    components = dict(trajectory.reward_components)
    if taken and not components:
        components = {ENVIRONMENT: trajectory.reward}
    components.update(taken)
    return replace(
        trajectory,
        reward=math.fsum(components.values()) if taken else trajectory.reward,
        reward_components=components,
        metrics={**trajectory.metrics, RAW_REWARD: trajectory.reward},
    )


def _costs(
    trajectory: Trajectory, penalties: RewardPenalties, effort: EffortLevel | None
) -> Mapping[str, float]:
    """What each kind takes, as numbers below 0."""
    calls = sum(turn.invalid_tool_call for turn in trajectory.turns)
    thinking = sum(turn.malformed_thinking for turn in trajectory.turns)
    costs = {
        "invalid_tool_call": calls * penalties.invalid_tool_call,
        "malformed_thinking": thinking * penalties.malformed_thinking,
    }
    if effort is not None:
        beyond = max(0, trajectory.sampled_tokens - effort.token_budget)
        costs["tokens"] = beyond * effort.token_penalty
    return {f"{PREFIX}{name}": -cost for name, cost in costs.items() if cost > 0}
