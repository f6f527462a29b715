"""What a rollout's reward loses for faults of form and for thinking beyond its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from .config import EffortLevel, RewardPenalties
from .failures import GymRewardError
from .trajectory import Trajectory

ENVIRONMENT = "environment"
PREFIX = "penalty/"
#: Metric with the reward before penalties; filters that ask whether a group agrees should look at this one.
RAW_REWARD = "reward/environment"


def apply_penalties(
    trajectory: Trajectory, penalties: RewardPenalties, effort: EffortLevel | None = None
) -> Trajectory:
    """The trajectory with the penalties in its reward and named among the reward's components.

    The components are the environment's own, or ``environment`` where it names none, and one ``penalty/…``
    for each kind that cost something; they sum to the new reward. The metric ``reward/environment`` keeps
    the old one. A trajectory without a reward stays without, and one that already has the metric is
    returned as it is.

    Raises:
        GymRewardError: the environment itself names a component ``penalty/…``.
    """
    if trajectory.reward is None or RAW_REWARD in trajectory.metrics:
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
