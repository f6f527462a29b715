"""The engine is on the policy's newest weights before it samples, and says what that took."""

from __future__ import annotations

import threading
import time

import pytest

from rl_app_core import rollout_engine
from rl_app_core.rollout_engine import ColocatedEngine, FleetEngine
from rl_generation.failures import NoReplicaError, RefitError
from rl_generation.fleet.states import ReplicaState
from rl_generation.protocol import Completion, GenerationRequest, SamplingParams

REQUEST = GenerationRequest((1, 2), SamplingParams(4, seed=1))
GREEDY = GenerationRequest((1, 2), SamplingParams(4, temperature=0))


class Policy:
    """A count of updates; the bytes are not looked at."""

    version = 0

    def weight_version(self):
        return self.version


class PretendedFleet:
    """Writes down what it is asked for. Serves while one replica is healthy, like the real one."""

    def __init__(self):
        self.weight_version = 0
        self.states = {"a": ReplicaState.HEALTHY, "b": ReplicaState.HEALTHY}
        self.calls = []
        self.refit_failure = None
        self.patience_s = 10.0

    def update_from(self, source, version):
        self.calls.append(("update", version))
        self._fail()
        self.weight_version = version
        self._serve()

    def refit_stale(self, source):
        self.calls.append(("stale", self.weight_version))
        self._fail()
        self._serve()

    def generate(self, requests):
        deadline = time.monotonic() + self.patience_s
        while ReplicaState.HEALTHY not in self.states.values():
            if time.monotonic() > deadline:
                raise NoReplicaError("nobody serves")
            time.sleep(0.01)
        self.calls.append(("generate", self.weight_version))
        return [Completion((7, 8), (-1.0, -2.0), "stop", self.weight_version) for _ in requests]

    def metrics(self):
        return {"serving": 2.0, "restarts": 1.0, "sent_again": 3.0, "requests": 9.0}

    def _fail(self):
        if self.refit_failure is not None:
            raise self.refit_failure

    def _serve(self):
        self.states = {
            name: ReplicaState.HEALTHY if state is ReplicaState.STALE else state
            for name, state in self.states.items()
        }


@pytest.fixture
def policy():
    return Policy()


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.setattr(rollout_engine, "_LOOK_EVERY_S", 0.05)
    return PretendedFleet()


@pytest.fixture
def engine(fleet, policy):
    engine = FleetEngine(fleet, policy)
    yield engine
    engine.close()


def test_initial_weights_are_not_handed_over(engine, fleet):
    engine.generate([REQUEST])
    assert fleet.calls == [("generate", 0)]


def test_whatever_changed_the_weights_they_are_handed_over_once_before_the_next_tokens(engine, fleet, policy):
    """After a warm start of 360 updates, after a step, after a resume."""
    policy.version = 360
    assert engine.generate([REQUEST])[0].weight_version == 360
    engine.generate([GREEDY])
    policy.version = 361
    engine.generate([REQUEST])
    assert fleet.calls == [
        *(("update", 360), ("generate", 360), ("generate", 360)),
        *(("update", 361), ("generate", 361)),
    ]


def test_over_http_the_weights_are_handed_over_before_anybody_asks(engine, fleet, policy):
    engine.refresh()
    assert fleet.calls == []
    policy.version = 3
    engine.refresh()
    engine.refresh()
    assert fleet.calls == [("update", 3)]
    assert engine.weight_version == 3
    fleet.states["b"] = ReplicaState.STALE
    engine.refresh()
    assert fleet.calls[1:] == [("stale", 3)]
    assert engine.take_metrics()["refit_seconds"] > 0


def test_nobody_waits_over_http_for_replicas_that_are_all_retired(engine, fleet):
    fleet.states = {"a": ReplicaState.DEAD, "b": ReplicaState.RETIRED}
    engine.refresh()
    fleet.states = dict.fromkeys("ab", ReplicaState.RETIRED)
    with pytest.raises(NoReplicaError, match="none of its 2 replicas is left; resume the run"):
        engine.refresh()


def test_weights_that_do_not_arrive_end_the_step(engine, fleet, policy):
    policy.version = 1
    fleet.refit_failure = RefitError("nobody took them")
    with pytest.raises(RefitError, match="nobody took them"):
        engine.generate([REQUEST])
    assert ("generate", 0) not in fleet.calls


def test_g3_a_replica_that_is_back_gets_the_present_weights_before_the_next_requests(engine, fleet):
    fleet.states["b"] = ReplicaState.STALE
    engine.generate([REQUEST])
    assert fleet.calls == [("stale", 0), ("generate", 0)]
    assert fleet.states["b"] is ReplicaState.HEALTHY
    engine.generate([REQUEST])
    assert fleet.calls[2:] == [("generate", 0)]


def test_a_replica_that_cannot_be_brought_back_does_not_keep_the_others_from_serving(engine, fleet):
    fleet.states["b"] = ReplicaState.STALE
    fleet.refit_failure = RefitError("it died again")
    assert engine.generate([REQUEST])


def test_requests_that_wait_for_replicas_which_died_together_are_served_when_one_is_back(engine, fleet):
    fleet.states = dict.fromkeys("ab", ReplicaState.DEAD)
    back = threading.Timer(0.3, lambda: fleet.states.update(a=ReplicaState.STALE))
    back.start()
    assert engine.generate([REQUEST])
    assert fleet.calls == [("stale", 0), ("generate", 0)]
    back.join()


def test_what_the_fleet_says_of_a_failure_is_what_the_caller_gets(engine, fleet):
    fleet.states = dict.fromkeys("ab", ReplicaState.RETIRED)
    fleet.patience_s = 0.2
    with pytest.raises(NoReplicaError, match="nobody serves"):
        engine.generate([REQUEST])


def test_the_numbers_are_of_the_time_since_they_were_last_taken(engine, policy):
    policy.version = 1
    engine.generate([REQUEST, REQUEST])
    metrics = engine.take_metrics()
    assert metrics["refit_seconds"] > 0
    assert metrics["generation_tokens_per_second"] == pytest.approx(4 / metrics["engine_seconds"])
    assert metrics["replicas_serving"] == 2
    assert (metrics["replica_restarts"], metrics["requests_sent_again"]) == (1, 3)
    engine.generate([GREEDY])
    assert engine.take_metrics().keys() == {"replicas_serving", "replica_restarts", "requests_sent_again"}


def test_an_engine_that_shares_the_policys_weights_hands_nothing_over(fleet):
    engine = ColocatedEngine(fleet)
    engine.refresh()
    engine.generate([REQUEST])
    assert fleet.calls == [("generate", 0)]
    assert engine.take_metrics().keys() == {"engine_seconds", "generation_tokens_per_second"}
    assert engine.take_metrics() == {}
