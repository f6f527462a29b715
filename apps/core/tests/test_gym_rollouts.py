"""Rollouts of a Gym as the loop asks for them: ids, seeds, weights before requests, faults by their kind."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from rl_app_core import gym_rollouts
from rl_app_core.gym_plan import GymPlan
from rl_app_core.gym_rollouts import GymRollouts
from rl_generation.failures import NoReplicaError
from rl_gym_bridge.answers.outcomes import failed
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environments import get_environment
from rl_gym_bridge.failures import GymServerDied
from rl_gym_bridge.identity import sampling_seed
from rl_gym_bridge.local import run_local_rollouts
from rl_gym_bridge.request_body import GenerationOverrides
from rl_gym_bridge.requests import RolloutResult
from rl_gym_bridge.testing import ScriptedChatModel
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

PLAN = GymPlan(
    {},
    model_name="policy",
    sampling=GenerationOverrides(temperature=0.7, top_p=1.0, max_new_tokens=9, seeded=True),
    greedy=GenerationOverrides(temperature=0.0, top_p=1.0, max_new_tokens=9),
    effort_levels=(),
    agents={},
    step_timeout_s=20.0,
    shutdown_timeout_s=1.0,
)
ROWS = [
    GymRow.from_mapping(
        {
            **{"responses_create_params": {"input": f"say {name}"}, "agent_ref": {"name": "exact_answer"}},
            **{"answer": name, "row_id": name},
        }
    )
    for name in ("a", "b", "a2")
]


class Engine:
    """Counts what it is asked for; its version grows when the policy has moved on."""

    def __init__(self, events):
        self.events = events
        self.policy = 7
        self.weight_version = 0
        self.failure = None

    def refresh(self):
        self.events.append("refresh")
        if self.failure is not None:
            raise self.failure
        self.weight_version = self.policy


class Runner:
    """Answers each request as it is told to, the last one first."""

    def __init__(self, events):
        self.events = events
        self.requests = []
        self.outcome = self.sampled
        self.pause_s = 0.0
        self.closed = False

    def sampled(self, request):
        turn = Turn((1, 2), (3, 4), (-0.5, -0.25))
        return Trajectory((turn,), 1.0, StopReason.STOP, request.group_id, request.rollout_id, request.agent)

    async def run_rollouts(self, requests):
        self.events.append("requests")
        self.requests += requests
        try:
            for request in reversed(requests):
                await asyncio.sleep(self.pause_s)
                yield RolloutResult(request, self.outcome(request))
        finally:
            self.closed = True


@pytest.fixture
def events():
    return []


@pytest.fixture
def runner(events):
    return Runner(events)


@pytest.fixture
def engine(events):
    return Engine(events)


@pytest.fixture
def rollouts(runner, engine, monkeypatch):
    monkeypatch.setattr(gym_rollouts, "_LOOK_EVERY_S", 0.05)
    return GymRollouts(runner, engine, PLAN, seed=5, check=lambda: None)


def failure(kind, error="it was so"):
    return lambda request: RolloutFailure(request.group_id, request.rollout_id, request.agent, kind, error)


@pytest.mark.parametrize(
    ("how", "prefix"),
    [
        ({}, "train"),
        ({"greedy": True}, "held_out"),
        ({"first": 6}, "train"),
        ({"group_prefix": "held_out_samples"}, "held_out_samples"),
    ],
)
def test_ids_and_order_are_those_of_rollouts_in_process(rollouts, how, prefix):
    local = run_local_rollouts(
        ROWS,
        {"exact_answer": get_environment("exact_answer")},
        ScriptedChatModel(lambda request: "x"),
        **{"group_size": 2, "step": 3, "seed": 5, "max_new_tokens": 9, "group_prefix": prefix, **how},
    )
    played = rollouts.rollouts(ROWS, group_size=2, step=3, **how)
    assert [(o.rollout_id, o.group_id) for o in played] == [(o.rollout_id, o.group_id) for o in local]


def test_each_rollout_has_the_seed_that_it_has_in_process_and_a_greedy_one_none(rollouts, runner):
    rollouts.rollouts([ROWS[0], ROWS[0]], group_size=2, step=3, first=4)
    params = [request.body["responses_create_params"] for request in runner.requests]
    assert [json.loads(each["metadata"]["extra_body"])["seed"] for each in params] == [
        sampling_seed(seed=5, step=3, row_id="a", occurrence=occurrence, index=index, turn=0)
        for occurrence in (4, 5)
        for index in (0, 1)
    ]
    assert {(each["temperature"], each["top_p"], each["max_output_tokens"]) for each in params} == {
        (0.7, 1, 9)
    }
    runner.requests.clear()
    rollouts.rollouts(ROWS, group_size=1, step=3, greedy=True)
    for request in runner.requests:
        assert request.body["responses_create_params"]["temperature"] == 0
        assert "metadata" not in request.body["responses_create_params"]


def test_the_engine_has_the_newest_weights_before_anything_is_asked(rollouts, events):
    rollouts.rollouts(ROWS, group_size=1, step=1)
    rollouts.rollouts(ROWS, group_size=1, step=1, greedy=True)
    assert events[:2] == ["refresh", "requests"]
    assert [event for event in events if event == "requests"] == ["requests"] * 2
    assert events.index("refresh", 2) < events.index("requests", 2)


def test_while_rollouts_are_played_replicas_that_come_back_are_given_weights(rollouts, runner, events):
    runner.pause_s = 0.2
    rollouts.rollouts(ROWS, group_size=1, step=1)
    assert events[:2] == ["refresh", "requests"]
    assert events.count("refresh") >= 4


def test_tokens_have_the_version_that_sampled_them_even_where_gym_drops_it(rollouts, runner, engine):
    assert {o.weight_versions for o in rollouts.rollouts(ROWS, group_size=1, step=1)} == {(7, 7)}
    runner.outcome = lambda request: replace(runner.sampled(request), weight_versions=(5, 6))
    assert {o.weight_versions for o in rollouts.rollouts(ROWS, group_size=1, step=1)} == {(5, 6)}


def test_a_version_that_changed_meanwhile_is_not_guessed(rollouts, runner, engine):
    def outcome(request):
        engine.weight_version = engine.policy = 8
        return runner.sampled(request)

    runner.outcome = outcome
    assert {o.weight_versions for o in rollouts.rollouts(ROWS, group_size=1, step=1)} == {()}


@pytest.mark.parametrize("kind", FailureKind)
def test_failures_keep_their_kind_and_are_no_samples(rollouts, runner, kind):
    runner.outcome = failure(kind)
    assert [(o.kind, o.error) for o in rollouts.rollouts(ROWS, group_size=2, step=1)] == [
        (kind, "it was so")
    ] * 6


def test_a_gym_that_died_ends_the_run_and_one_that_is_only_slow_does_not(runner, engine):
    def died():
        raise GymServerDied("it ended", component="verifier")

    rollouts = GymRollouts(runner, engine, PLAN, seed=5, check=died)
    assert len(rollouts.rollouts(ROWS, group_size=1, step=1)) == 3
    for kind in FailureKind:
        runner.outcome = failure(kind, "GymTimeout: no answer")
        assert len(rollouts.rollouts(ROWS, group_size=1, step=1)) == 3

    def lost(request):
        # As the bridge itself puts it.
        return failed(request, GymServerDied("it ended")).outcome

    runner.outcome = lost
    with pytest.raises(GymServerDied, match="verifier"):
        rollouts.rollouts(ROWS, group_size=1, step=1)


def test_an_engine_without_replicas_ends_the_wait_and_the_rollouts(rollouts, runner, engine):
    runner.pause_s = 30.0

    def outcome(request):
        raise AssertionError("nobody waits for it")

    runner.outcome = outcome
    original = engine.refresh

    def refresh():
        if engine.events.count("refresh") > 2:
            engine.failure = NoReplicaError("none is left")
        original()

    engine.refresh = refresh
    began = time.monotonic()
    with pytest.raises(NoReplicaError, match="none is left"):
        rollouts.rollouts(ROWS, group_size=1, step=1)
    assert time.monotonic() - began < 10
    assert runner.closed


def test_weights_that_do_not_arrive_ask_nobody(rollouts, runner, engine):
    engine.failure = NoReplicaError("nobody took them")
    with pytest.raises(NoReplicaError):
        rollouts.rollouts(ROWS, group_size=1, step=1)
    assert runner.requests == []


def test_ctrl_c_closes_what_runs(rollouts, runner):
    runner.pause_s = 0.01

    def outcome(request):
        raise KeyboardInterrupt

    runner.outcome = outcome
    with pytest.raises(KeyboardInterrupt):
        rollouts.rollouts(ROWS, group_size=1, step=1)
    assert runner.closed
