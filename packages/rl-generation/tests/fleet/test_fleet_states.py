"""The state machine of a replica under a clock that the test moves."""

from __future__ import annotations

import itertools
import random

import pytest

from rl_generation.fleet.settings import FleetSettings, RestartPolicy
from rl_generation.fleet.states import (
    LIVE,
    TRANSITIONS,
    ReplicaEvent,
    ReplicaMachine,
    ReplicaState,
    TransitionError,
)

S, E = ReplicaState, ReplicaEvent


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def machine(clock: Clock, **policy: float) -> ReplicaMachine:
    return ReplicaMachine("r", RestartPolicy(**{"jitter": 0.0, **policy}), clock, draw=lambda: 0.5)


def brought_to(state: ReplicaState, clock: Clock) -> ReplicaMachine:
    """A machine that came into a state on a way that the table allows."""
    ways = {
        S.RESTARTING: [],
        S.HEALTHY: [E.STARTED_CURRENT],
        S.SUSPECT: [E.STARTED_CURRENT, E.FAILED],
        S.STALE: [E.STARTED],
        S.DEAD: [E.DIED],
        S.RETIRED: [E.RETIRE],
    }
    made = machine(clock)
    for event in ways[state]:
        made.fire(event)
    assert made.state is state
    clock.now += 100
    return made


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_every_pair_is_in_the_table_or_a_typed_error(
    state: ReplicaState, event: ReplicaEvent, clock: Clock
) -> None:
    found = brought_to(state, clock)
    expected = TRANSITIONS[state].get(event)
    if expected is None:
        assert not found.allows(event)
        with pytest.raises(TransitionError, match=f"replica r: '{event}' cannot happen while it is {state}"):
            found.fire(event)
        assert found.state is state
    else:
        assert found.allows(event)
        assert found.fire(event) is expected is found.state


def test_g3_only_a_completed_refit_makes_a_stale_replica_healthy() -> None:
    ways = [(event, new) for event, new in TRANSITIONS[S.STALE].items() if new is S.HEALTHY]
    assert ways == [(E.REFITTED, S.HEALTHY)]


def test_a_restart_is_healthy_only_by_saying_that_no_refit_ever_was() -> None:
    ways = [event for event, new in TRANSITIONS[S.RESTARTING].items() if new is S.HEALTHY]
    assert ways == [E.STARTED_CURRENT]


def test_the_dead_come_back_through_a_restart_alone() -> None:
    assert {new for new in TRANSITIONS[S.DEAD].values()} == {S.RESTARTING, S.RETIRED}
    assert TRANSITIONS[S.RETIRED] == {}
    assert {state for state in S if E.FAILED in TRANSITIONS[state]} == LIVE


def test_delays_double_to_the_longest_and_then_it_retires(clock: Clock) -> None:
    made = machine(clock, max_restarts=7)
    delays = []
    while not made.exhausted:
        made.fire(E.DIED)
        delays.append(made.seconds_to_restart)
        with pytest.raises(TransitionError, match="too early to restart it"):
            made.fire(E.RESTART)
        clock.now += made.seconds_to_restart
        made.fire(E.RESTART)
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    made.fire(E.DIED)
    clock.now += 1000
    with pytest.raises(TransitionError, match="all 7 restarts are used"):
        made.fire(E.RESTART)
    assert made.fire(E.RETIRE) is S.RETIRED


def test_the_default_budget_is_five_restarts_within_thirty_seconds() -> None:
    policy = RestartPolicy()
    assert policy.max_restarts == 5
    assert [policy.delay_s(n, 0.0) for n in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert policy.delay_s(0, 0.999) > 0.75
    assert policy.delay_s(10_000, 0.0) == 30


def test_jitter_parts_replicas_that_died_together(clock: Clock) -> None:
    machines = [ReplicaMachine(f"r{i}", RestartPolicy(), clock) for i in range(8)]
    for made in machines:
        made.fire(E.DIED)
    assert len({made.seconds_to_restart for made in machines}) == 8


def test_long_service_forgives_and_a_short_one_does_not(clock: Clock) -> None:
    made = machine(clock, forgive_after_s=600)
    for served_s, expected in ((599.0, 2), (300.0, 3)):
        made.fire(E.DIED)
        clock.now += made.seconds_to_restart
        made.fire(E.RESTART)
        made.fire(E.STARTED_CURRENT)
        clock.now += served_s
        assert made.restarts == expected - 1
    made.fire(E.OUTDATED)
    made.fire(E.REFITTED)
    clock.now += 300.0
    made.fire(E.DIED)
    assert (made.restarts, made.seconds_to_restart) == (0, 1.0)


def test_failures_are_counted_until_an_answer_a_start_or_a_refit(clock: Clock) -> None:
    made = brought_to(S.HEALTHY, clock)
    made.fire(E.FAILED)
    made.fire(E.RECOVERED)
    made.fire(E.FAILED)
    assert made.failures == 2
    made.answered()
    assert made.failures == 0
    made.fire(E.FAILED)
    made.fire(E.OUTDATED)
    made.fire(E.REFITTED)
    assert made.failures == 0


def test_what_fails_before_a_probe_has_decided_is_one_incident(clock: Clock) -> None:
    made = brought_to(S.HEALTHY, clock)
    for _ in range(9):
        made.fire(E.FAILED)
    assert (made.failures, made.incidents) == (1, 1)
    made.fire(E.RECOVERED)
    made.answered()
    made.fire(E.FAILED)
    assert (made.failures, made.incidents) == (1, 2)


def test_listeners_hear_changes_only(clock: Clock) -> None:
    made = brought_to(S.SUSPECT, clock)
    heard: list[tuple[ReplicaState, ReplicaState]] = []
    made.listen(lambda old, new: heard.append((old, new)))
    made.fire(E.FAILED)
    made.fire(E.RECOVERED)
    assert heard == [(S.SUSPECT, S.HEALTHY)]


def test_random_walks_keep_the_rules(clock: Clock) -> None:
    """500 walks: healthy after stale only by a refit, restarts within the budget and never too early."""
    for seed in range(500):
        rng = random.Random(seed)
        made = ReplicaMachine("r", RestartPolicy(max_restarts=3), clock, rng.random)
        restarts, died_at = 0, 0.0
        for _ in range(60):
            clock.now += rng.expovariate(1.0)
            before = made.state
            event = rng.choice(list(E))
            if not made.allows(event):
                with pytest.raises(TransitionError):
                    made.fire(event)
                assert made.state is before
                continue
            after = made.fire(event)
            if before is S.STALE and after is S.HEALTHY:
                assert event is E.REFITTED
            if event is E.DIED:
                died_at = clock.now
            if event is E.RESTART:
                restarts += 1
                assert clock.now - died_at >= 0.75
        assert restarts <= 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_restarts": -1},
        {"first_delay_s": 31.0},
        {"first_delay_s": -1.0},
        {"jitter": 1.5},
        {"forgive_after_s": -1.0},
    ],
)
def test_a_policy_names_what_is_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RestartPolicy(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"probe_timeout_s": 0},
        {"request_timeout_s": float("inf")},
        {"infra_budget": -1},
        {"probe_failures": 0},
    ],
)
def test_settings_name_what_is_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FleetSettings(**wrong)
