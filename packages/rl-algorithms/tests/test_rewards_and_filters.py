from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_algorithms.advantages import dr_grpo_advantages
from rl_algorithms.filters import not_truncated, zero_spread_groups
from rl_algorithms.rewards import LinearScaling, OverlongPenalty, RewardError, RewardPenalties, RewardShaping
from rl_gym_bridge.trajectory import StopReason, Trajectory, Turn


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_linear_scaling_is_clamped():
    scaling = LinearScaling(0, 10, -1, 1)
    assert scaling(doubles(-5, 0, 2.5, 10, 99)).tolist() == [-1, -1, -0.5, 1, 1]
    with pytest.raises(RewardError, match="source_min 3 must lie below"):
        LinearScaling(3, 3, 0, 1)


def test_of_several_turns_the_longest_is_too_long_not_all_together():
    """Each turn has a limit of its own: two of 20 tokens are far from 32, one of 30 is near it."""
    shaping = RewardShaping(overlong=OverlongPenalty(max_length=32, buffer=8))

    def of(*lengths):
        turns = tuple(Turn((1,), (2,) * length, (-1.0,) * length) for length in lengths)
        return Trajectory(turns, 1.0, StopReason.STOP, group_id="g", rollout_id="g/0")

    shaped = shaping(torch.ones(3, dtype=torch.float64), [of(20), of(20, 20), of(20, 30)])
    assert shaped.tolist() == [1.0, 1.0, 0.25]


def test_c9_overlong_penalty_values():
    penalty = OverlongPenalty(max_length=20, buffer=4)
    assert penalty(torch.tensor([3, 16, 17, 18, 20, 21])).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert OverlongPenalty(20, 4, penalty=2.0)(torch.tensor([18, 40])).tolist() == [-1, -2]
    with pytest.raises(RewardError, match="buffer 0"):
        OverlongPenalty(20, 0)


def rollout(tokens, reason=StopReason.STOP, **faults):
    turn = Turn((1,), (2,) * tokens, (-1.0,) * tokens, **faults)
    return Trajectory((turn,), 1.0, reason, group_id="g", rollout_id="g/0")


def test_each_broken_rule_costs_once():
    penalties = RewardPenalties(invalid_tool_call=0.5, malformed_thinking=0.25, truncated=2.0)
    twice = Turn((1,), (2,), (-1.0,), invalid_tool_call=True)
    rollouts = [
        rollout(3),
        replace(rollout(1), turns=(twice, twice)),
        rollout(1, StopReason.TOOL_LIMIT, invalid_tool_call=True, malformed_thinking=True),
    ]
    assert penalties(rollouts).tolist() == [0, 0.5, 2.75]
    shaping = RewardShaping(scaling=LinearScaling(0, 2, 0, 1), penalties=penalties)
    assert shaping(doubles(2, 2, float("nan")), rollouts)[:2].tolist() == [1, 0.5]
    assert shaping(doubles(2, 2, float("nan")), rollouts)[2].isnan()
    with pytest.raises(RewardError, match="penalty truncated"):
        RewardPenalties(truncated=-1.0)


def test_shaping_order_and_the_stop_properly_coefficient():
    rollouts = [rollout(5), rollout(20, StopReason.LENGTH)]
    shaped = RewardShaping(scaling=LinearScaling(0, 2, 0, 1), overlong=OverlongPenalty(20, 4))
    assert shaped(doubles(2, 2), rollouts).tolist() == [1, 0]
    assert RewardShaping(stop_properly_coefficient=0.25)(doubles(2, 2), rollouts).tolist() == [2, 0.5]
    assert RewardShaping()(doubles(2, 2), rollouts).tolist() == [2, 2]
    with pytest.raises(RewardError, match="replaces the overlong penalty"):
        RewardShaping(overlong=OverlongPenalty(20, 4), stop_properly_coefficient=0.5)
    with pytest.raises(RewardError, match=r"\[0, 1\], got 1.5"):
        RewardShaping(stop_properly_coefficient=1.5)


def test_c4_a_reward_that_is_taken_away_is_away_before_the_baseline():
    rollouts = [rollout(5), rollout(20, StopReason.LENGTH)]
    found = []
    for paid in (1.0, 100.0):
        shaped = RewardShaping(stop_properly_coefficient=0.0)(doubles(1.0, paid), rollouts)
        found.append(dr_grpo_advantages(shaped, ["g", "g"], torch.tensor([True, True])).tolist())
    assert found[0] == found[1] == [0.5, -0.5]


def test_b10_truncation_is_the_stop_reason():
    """Which token came last plays no part: the function does not even see tokens."""
    reasons = [StopReason.STOP, StopReason.LENGTH, StopReason.TOOL_LIMIT, StopReason.ABORTED]
    assert not_truncated(reasons).tolist() == [True, False, False, False]


def test_a2_zero_spread_is_judged_before_shaping():
    raw, lengths = doubles(0, 0, 0, 0), torch.tensor([10, 20, 18, 25])
    shaped = raw + OverlongPenalty(20, 4)(lengths)
    assert shaped.tolist() == [0, -1, -0.5, -1]
    everyone = torch.ones(4, dtype=torch.bool)
    assert zero_spread_groups(raw, ["g"] * 4, everyone) == {"g"}
    assert zero_spread_groups(shaped, ["g"] * 4, everyone) == frozenset()


def test_zero_spread_looks_at_valid_members_of_each_group():
    rewards = doubles(1, 0, 1, 1, float("nan"), 5, 0.1 + 0.2, 0.3)
    groups = ["a", "b", "a", "b", "a", "c", "d", "d"]
    valid = torch.tensor([True, True, True, True, False, False, True, True])
    assert zero_spread_groups(rewards, groups, valid) == {"a", "c", "d"}
