"""A Gym that starts in the background: it is waited for, refused, given up and ended."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from rl_app_core import gym_environment
from rl_app_core.config import ConfigError
from rl_app_core.gym_environment import starting_gym
from rl_app_core.gym_plan import GymPlan
from rl_gym_bridge.config import DeferredBaseUrls
from rl_gym_bridge.failures import GymStartError, GymTimeout
from rl_gym_bridge.request_body import GenerationOverrides

URLS = ["http://127.0.0.1:9/v1"]


def plan(**agents):
    return GymPlan(
        {"config_paths": ["a.yaml"]},
        model_name="policy",
        sampling=GenerationOverrides(),
        greedy=GenerationOverrides(),
        effort_levels=(),
        agents=agents,
        step_timeout_s=1.0,
        shutdown_timeout_s=3.0,
    )


class Handle:
    """Of an actor whose Gym has two agents."""

    def __init__(self):
        self.ended = threading.Event()
        self.failure = None

    def health_check(self):
        return SimpleNamespace(agents=("adder", "capitals_agent"))

    def shutdown(self, timeout_s):
        assert timeout_s == 3.0
        self.ended.set()
        if self.failure is not None:
            raise self.failure


class Factory:
    """Stands for the bridge's; what it does after it has made the actor is chosen by a test."""

    def __init__(self):
        self.handle = Handle()
        self.given = None
        self.before = lambda: None
        self.start = lambda: None
        self.created = threading.Event()
        self.cleaned = threading.Event()

    def __call__(self, section, *, created, **given):
        self.before()
        self.given = (section, given)
        try:
            created(self.handle)
            self.created.set()
            self.start()
        except BaseException:
            self.cleaned.set()
            raise
        return self.handle


@pytest.fixture
def factory(monkeypatch):
    double = Factory()
    monkeypatch.setattr(gym_environment, "spinup_nemo_gym_actor", double)
    return double


def start(tmp_path, wanted=None):
    return starting_gym(wanted or plan(adder="r1"), URLS, ready_timeout_s=77.0, work_dir=tmp_path / "gym")


def test_it_starts_beside_the_caller_with_addresses_whose_servers_still_load(factory, tmp_path):
    loaded = threading.Event()
    factory.start = lambda: loaded.wait(10)
    with start(tmp_path) as gym:
        # What loads meanwhile is the engine; nobody has waited for Gym yet.
        loaded.set()
        assert gym.wait() is factory.handle
        assert not factory.handle.ended.is_set()
    assert factory.handle.ended.is_set()
    section, given = factory.given
    assert section == {"nemo_gym": {"work_dir": str(tmp_path / "gym"), "config_paths": ["a.yaml"]}}
    assert given["base_urls"] == DeferredBaseUrls(tuple(URLS), 77.0)
    assert (given["model_name"], given["tokenizer"]) == ("policy", None)


def test_why_it_did_not_start_is_what_the_caller_gets(factory, tmp_path):
    problem = GymStartError("no server is called so", component="gym")

    def fail():
        raise problem

    factory.start = fail
    with pytest.raises(GymStartError) as caught, start(tmp_path) as gym:
        gym.wait()
    assert caught.value is problem


def test_an_agent_that_gym_does_not_have_is_the_configurations_fault(factory, tmp_path):
    with (
        pytest.raises(ConfigError, match=r"row r7 names the agent 'capitals'.*did you mean capitals_agent\?"),
        start(tmp_path, plan(adder="r1", capitals="r7")) as gym,
    ):
        gym.wait()
    assert factory.handle.ended.is_set()


def test_one_that_still_starts_is_given_up_when_something_else_fails(factory, tmp_path):
    def starts():
        factory.handle.ended.wait(20)
        raise GymStartError("it was shut down while it started")

    factory.start = starts
    began = time.monotonic()

    def load_the_engine():
        assert factory.created.wait(10)
        raise ZeroDivisionError("the engine's fault")

    with pytest.raises(ZeroDivisionError), start(tmp_path):
        load_the_engine()
    assert time.monotonic() - began < 10
    assert factory.cleaned.is_set()


def test_one_whose_actor_is_not_there_yet_never_starts(factory, tmp_path):
    go_on = threading.Event()
    factory.before = lambda: go_on.wait(10)
    threading.Timer(0.3, go_on.set).start()
    with pytest.raises(ZeroDivisionError), start(tmp_path):
        raise ZeroDivisionError("the engine's fault")
    assert factory.cleaned.is_set()


def test_what_is_left_of_it_is_said_unless_something_else_went_wrong(factory, tmp_path):
    factory.handle.failure = GymTimeout("process 1 survived", component="gym")
    with pytest.raises(GymTimeout), start(tmp_path) as gym:
        gym.wait()
    factory.handle.ended.clear()

    def rollouts(runner):
        raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError), start(tmp_path) as gym:
        rollouts(gym.wait())
    assert factory.handle.ended.is_set()
