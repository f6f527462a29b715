"""Metrics are the same counted live or afterwards; a task that always fails stays visible in the coverage."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rl_gym_bridge.coverage import Coverage
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.rollout_metrics import RolloutMetrics
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn


def request(row: str, index: int = 0, *, agent: str = "a", effort: str = "") -> RolloutRequest:
    return RolloutRequest(f"{row}/{index}", row, row, agent, {}, effort)


def result(
    of: RolloutRequest,
    reward: float | None = 1.0,
    *,
    tokens: int = 2,
    turns: int = 1,
    stop: StopReason = StopReason.STOP,
    flags: dict[str, bool] | None = None,
    seconds: float = 1.0,
    attempts: int = 1,
    **fields: Any,
) -> RolloutResult:
    turn = Turn((1,), (5,) * tokens, (-0.5,) * tokens, **(flags or {}))
    outcome = Trajectory((turn,) * turns, reward, stop, of.group_id, of.rollout_id, of.agent, **fields)
    return RolloutResult(of, outcome, attempts=attempts, seconds=seconds)


def failed(of: RolloutRequest, kind: FailureKind = FailureKind.INFRA, **fields: Any) -> RolloutResult:
    return RolloutResult(of, RolloutFailure(of.group_id, of.rollout_id, of.agent, kind, "x"), **fields)


def test_numbers_of_one_agent() -> None:
    results = [
        result(request("r", 0), 1.0, tokens=2, turns=2, seconds=2.0, metrics={"score": 0.5}),
        result(
            request("r", 1),
            0.0,
            tokens=6,
            stop=StopReason.LENGTH,
            flags={"invalid_tool_call": True},
            attempts=3,
        ),
        result(request("r", 2), None, flags={"malformed_thinking": True}),
        failed(request("r", 3), attempts=5, seconds=4.0),
        failed(request("r", 4), FailureKind.DATA),
    ]
    made = {
        name.removeprefix("a/"): value
        for name, value in RolloutMetrics.of(results).summary().items()
        if name.startswith("a/")
    }
    assert made == {
        "rollouts": 5.0,
        "samples": 2.0,
        "without_reward": 1.0,
        "attempts": 11.0,
        "failures_infra": 1.0,
        "failures_data": 1.0,
        "seconds_mean": pytest.approx(1.6),
        "seconds_max": 4.0,
        "truncated_share": pytest.approx(1 / 3),
        "invalid_tool_call_share": pytest.approx(1 / 3),
        "malformed_thinking_share": pytest.approx(1 / 3),
        "turns_mean": pytest.approx(4 / 3),
        "tokens_mean": 4.0,
        "tokens_max": 6.0,
        "metric/score_mean": 0.5,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "reward_environment_mean": 0.5,
    }


def test_agents_and_levels_are_counted_apart_and_together() -> None:
    made = RolloutMetrics.of(
        [
            result(request("r", 0, agent="a", effort="low"), 1.0),
            result(request("r", 1, agent="a", effort="high"), 0.0),
            result(request("s", 0, agent="b"), 0.0),
        ]
    ).summary()
    assert made["a/reward_mean"] == 0.5
    assert made["b/reward_mean"] == 0.0
    assert made["all/reward_mean"] == pytest.approx(1 / 3)
    assert (made["a/effort/low/reward_mean"], made["a/effort/high/reward_mean"]) == (1.0, 0.0)


def test_an_agent_that_only_fails_has_no_mean_reward() -> None:
    made = RolloutMetrics.of([failed(request("r"))]).summary()
    assert made["a/failures_infra"] == 1.0
    assert "a/reward_mean" not in made
    assert "a/tokens_mean" not in made


def test_a_component_that_a_sample_lacks_counts_as_zero() -> None:
    made = RolloutMetrics.of(
        [
            result(request("r", 0), 1.0, reward_components={"environment": 1.5, "penalty/x": -0.5}),
            result(request("r", 1), 1.0),
        ]
    ).summary()
    assert made["a/component/penalty/x_mean"] == -0.25


def awkward_results(count: int = 200) -> list[RolloutResult]:
    rng = random.Random(3)
    results = []
    for index in range(count):
        of = request(f"r{index}", agent=rng.choice(["a", "b"]), effort=rng.choice(["", "low"]))
        if rng.random() < 0.2:
            results.append(failed(of, rng.choice(list(FailureKind)), seconds=rng.random()))
        else:
            reward = rng.choice([0.1, 0.2, 1e6, -1e6, 1 / 3])
            results.append(
                result(
                    of, reward, seconds=rng.random(), tokens=rng.randrange(1, 9), metrics={"m": rng.random()}
                )
            )
    return results


def test_k7_counted_live_in_any_order_or_in_parts_every_digit_is_the_same() -> None:
    """K7: what is logged live equals what is recomputed from the results."""
    results = awkward_results()
    expected = RolloutMetrics.of(results).summary()
    shuffled = list(results)
    random.Random(1).shuffle(shuffled)
    live = RolloutMetrics()
    for entry in shuffled:
        live.add(entry)
    assert live.summary() == expected
    first, second = RolloutMetrics.of(shuffled[:70]), RolloutMetrics.of(shuffled[70:])
    second.merge(first)
    assert second.summary() == expected


def test_k7_a_result_that_was_not_kept_is_not_in_the_mean() -> None:
    """K7: 4 succeed, 1 fails, 1 is lost before it is kept; after the resume the lost one runs again."""
    rewards = [1.0, 0.0, 1.0, 1.0]
    kept = [result(request(f"r{index}"), reward) for index, reward in enumerate(rewards)]
    kept.append(failed(request("r4")))
    live = RolloutMetrics.of(kept)
    again = result(request("r5"), 0.0)
    live.add(again)
    assert live.summary() == RolloutMetrics.of([*kept, again]).summary()
    assert live.summary()["a/reward_mean"] == pytest.approx(3 / 5)


# --- coverage


def covered(*results: RolloutResult) -> Coverage:
    coverage = Coverage()
    coverage.expect(entry.request for entry in results)
    for entry in results:
        coverage.add(entry)
    return coverage


def test_a_task_that_fails_every_time_stays_visible() -> None:
    steps = [
        covered(
            failed(request("bad", 0)),
            failed(request("bad", 1), FailureKind.DATA),
            result(request("good")),
            result(request("good", 1)),
        )
        for _ in range(3)
    ]
    total = Coverage()
    for step in steps:
        total.merge(step)
    assert total.never_completed == ("bad",)
    bad = total.tasks["bad"]
    assert (bad.expected, bad.completed, bad.missing, bad.failed_infra, bad.failed_data) == (6, 0, 6, 3, 3)
    assert total.tasks["good"].missing == 0
    assert total.summary() == {
        f"{scope}/coverage/{name}": value
        for scope in ("all", "a")
        for name, value in (
            ("tasks", 2.0),
            ("tasks_never_completed", 1.0),
            ("expected", 12.0),
            ("completed", 6.0),
            ("missing", 6.0),
        )
    }
    assert steps[0].tasks["bad"].expected == 2


def test_what_was_asked_for_and_never_came_is_missing() -> None:
    coverage = Coverage()
    coverage.expect([request("r", 0), request("r", 1)])
    coverage.add(result(request("r", 0)))
    assert coverage.tasks["r"].missing == 1
    assert coverage.never_completed == ()


def test_a_task_that_completes_once_is_no_longer_never_completed() -> None:
    total = covered(failed(request("r")))
    assert total.never_completed == ("r",)
    total.merge(covered(result(request("r"))))
    assert total.never_completed == ()


def test_coverage_goes_into_a_checkpoint_and_back() -> None:
    coverage = covered(failed(request("bad")), result(request("good", agent="b")))
    stored = json.loads(json.dumps(coverage.to_mapping()))
    again = Coverage.from_mapping(stored)
    assert again.tasks == coverage.tasks
    again.merge(coverage)
    assert again.tasks["bad"].expected == 2


def test_agents_are_covered_apart() -> None:
    numbers = covered(failed(request("r", agent="a")), result(request("s", agent="b"))).summary()
    assert (numbers["a/coverage/completed"], numbers["b/coverage/completed"]) == (0.0, 1.0)
    assert numbers["all/coverage/tasks_never_completed"] == 1.0
