"""Effort levels are drawn the same everywhere; penalties are parts of the reward that one can see."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from rl_gym_bridge.config import EffortLevel, RewardPenalties
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.effort import choose_effort
from rl_gym_bridge.errors import DatasetError
from rl_gym_bridge.failures import GymConfigError, GymRewardError
from rl_gym_bridge.penalties import PenaltyTaker, apply_penalties
from rl_gym_bridge.request_body import GenerationOverrides
from rl_gym_bridge.rows import collate_rollout_requests
from rl_gym_bridge.trajectory import StopReason, Trajectory, Turn

LOW = EffortLevel("low", share=0.25, token_budget=3, token_penalty=0.01)
HIGH = EffortLevel("high", share=0.5)
LEVELS = (LOW, HIGH)


def row(name: str = "q", **fields: Any) -> GymRow:
    return GymRow.from_mapping(
        {"responses_create_params": {"input": name}, "agent_ref": {"name": "a"}, "row_id": name, **fields}
    )


def drawn(of: GymRow, *, seed: int = 0, step: int = 0, occurrence: int = 0) -> str:
    level = choose_effort(of, LEVELS, seed=seed, step=step, occurrence=occurrence)
    return level.name if level else ""


def test_the_rows_own_level_wins() -> None:
    for name in ("low", "high"):
        assert {drawn(row(str(index), effort=name)) for index in range(20)} == {name}


@pytest.mark.parametrize(
    ("name", "hint"), [("hgih", "did you mean 'high'"), ("zzz", "low, high"), (3, "low, high")]
)
def test_an_unknown_level_is_refused_with_a_hint(name: Any, hint: str) -> None:
    with pytest.raises(DatasetError, match=hint):
        drawn(row(effort=name))


def test_without_levels_the_field_is_the_environments_own() -> None:
    assert choose_effort(row(effort="anything"), (), seed=0, step=0) is None


def test_levels_are_drawn_with_their_shares_and_the_rest_gets_none() -> None:
    count = 4000
    counts = Counter(drawn(row(str(index))) for index in range(count))
    for name, share in (("low", 0.25), ("high", 0.5), ("", 0.25)):
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs(counts[name] / count - share) < 4 * deviation


def test_a_draw_depends_on_seed_step_row_and_occurrence_alone() -> None:
    rows = [row(str(index)) for index in range(64)]
    first = [drawn(entry) for entry in rows]
    assert [drawn(entry) for entry in reversed(rows)][::-1] == first
    for changed in ({"seed": 1}, {"step": 1}, {"occurrence": 1}):
        assert [drawn(entry, **changed) for entry in rows] != first


def test_known_draws_do_not_change_between_releases() -> None:
    assert [drawn(row(str(index)), seed=7, step=3) for index in range(8)] == KNOWN


KNOWN = ["high", "low", "low", "high", "high", "", "low", "low"]


def test_the_whole_group_gets_one_level() -> None:
    groups = collate_rollout_requests(
        [row(str(index)) for index in range(40)],
        generation=GenerationOverrides(),
        group_size=4,
        step=2,
        seed=1,
        effort_levels=LEVELS,
    )
    per_group = [{request.effort for request in group} for group in groups]
    assert all(len(names) == 1 for names in per_group)
    assert set.union(*per_group) == {"", "low", "high"}


# --- penalties


def rollout(
    *, reward: float | None = 1.0, invalid: int = 0, malformed: int = 0, tokens: int = 2, **fields: Any
) -> Trajectory:
    turns = tuple(
        Turn(
            (1,),
            tuple(range(tokens // 2)),
            (-0.5,) * (tokens // 2),
            invalid_tool_call=index < invalid,
            malformed_thinking=index < malformed,
        )
        for index in range(2)
    )
    return Trajectory(turns, reward, StopReason.STOP, "g", "g/0", "a", **fields)


def test_penalties_are_parts_of_the_reward_and_the_environments_reward_stays_visible() -> None:
    made = apply_penalties(
        rollout(invalid=2, malformed=1), RewardPenalties(invalid_tool_call=0.1, malformed_thinking=0.25)
    )
    assert made.reward_components == {
        "environment": 1.0,
        "penalty/invalid_tool_call": -0.2,
        "penalty/malformed_thinking": -0.25,
    }
    assert made.reward == pytest.approx(0.55)
    assert made.reward == math.fsum(made.reward_components.values())
    assert made.metrics["reward/environment"] == 1.0


def test_tokens_beyond_the_levels_budget_cost_each() -> None:
    made = apply_penalties(rollout(tokens=10), RewardPenalties(), LOW)
    assert made.reward_components == {"environment": 1.0, "penalty/tokens": pytest.approx(-0.07)}
    within = apply_penalties(rollout(tokens=2), RewardPenalties(), LOW)
    assert within.reward == 1.0
    assert within.reward_components == {}
    assert apply_penalties(rollout(tokens=10), RewardPenalties()).reward == 1.0


def test_the_environments_own_components_stay() -> None:
    of = rollout(reward_components={"format": 0.25, "answer": 0.75}, invalid=1)
    made = apply_penalties(of, RewardPenalties(invalid_tool_call=0.5))
    assert made.reward_components == {"format": 0.25, "answer": 0.75, "penalty/invalid_tool_call": -0.5}
    assert made.reward == 0.5
    assert of.reward == 1.0


def test_what_costs_nothing_changes_nothing_but_the_metric() -> None:
    of = rollout(metrics={"score": 1.0})
    made = apply_penalties(of, RewardPenalties(invalid_tool_call=0.5))
    assert (made.reward, made.reward_components) == (1.0, {})
    assert made.metrics == {"score": 1.0, "reward/environment": 1.0}
    assert made.turns is of.turns


def test_a_rollout_without_reward_stays_without() -> None:
    of = rollout(reward=None, invalid=1)
    assert apply_penalties(of, RewardPenalties(invalid_tool_call=0.5)) is of


def test_a_number_that_the_environment_names_like_the_bridges_switches_no_penalty_off() -> None:
    of = rollout(invalid=1, metrics={"reward/environment": 9.0})
    made = apply_penalties(of, RewardPenalties(invalid_tool_call=0.5))
    assert (made.reward, made.metrics["reward/environment"]) == (0.5, 1.0)


def test_a_level_whose_price_nobody_gave_is_refused() -> None:
    taker = PenaltyTaker(RewardPenalties(), LEVELS)
    assert taker.taken(rollout(tokens=10), "low").reward == pytest.approx(0.93)
    assert taker.taken(rollout(tokens=10), "").reward == 1.0
    with pytest.raises(GymConfigError, match="'max', which is none of low, high"):
        taker.taken(rollout(), "max")


def test_an_environment_may_not_name_a_component_like_a_penalty() -> None:
    of = rollout(reward_components={"penalty/invalid_tool_call": 1.0}, invalid=1)
    with pytest.raises(GymRewardError, match="penalty/invalid_tool_call"):
        apply_penalties(of, RewardPenalties(invalid_tool_call=0.5))
