"""The factory's calls to Ray, in order, and what becomes of a start that fails at each step.

Here Ray is a double that records calls and fails where it is told to; ``test_factory_with_ray.py`` uses the
real one.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rl_actor_envs.errors import ActorEnvironmentError
from rl_gym_bridge.actor import NemoGym
from rl_gym_bridge.actor_handle import NemoGymHandle
from rl_gym_bridge.config import DeferredBaseUrls, NemoGymConfig
from rl_gym_bridge.endings import GRACE_S, LAYER_S
from rl_gym_bridge.factory import (
    NEMO_GYM_GRACEFUL_SHUTDOWN_TIMEOUT_S,
    shutdown_environments,
    spinup_nemo_gym_actor,
)
from rl_gym_bridge.failures import (
    GymConfigError,
    GymHttpError,
    GymServerDied,
    GymStartError,
    GymTimeout,
    GymUnavailable,
)
from rl_gym_bridge.session import GymSession

NODE = "node-of-the-caller"
TOKENIZER = types.SimpleNamespace(decode=str)
ALL_IS_WELL = ["create", "call start", "get start", "call set_tokenizer", "get set_tokenizer"]
CLEANED = ["call shutdown", "get shutdown", "kill"]


class DoubleRayError(Exception):
    """Stands for ``ray.exceptions.RayError``."""


class DoubleTaskError(DoubleRayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__("a task failed")
        self.cause = cause


class DoubleActorError(DoubleRayError):
    """Stands for ``RayActorError``."""


class DoubleTimeout(DoubleRayError, TimeoutError):
    """Stands for ``GetTimeoutError``."""


class RecordedRay(types.ModuleType):
    """A double of the module ``ray``; it schedules nothing and runs no process.

    Attributes:
        events: what was called, in order: ``create``, ``call METHOD``, ``get METHOD``, ``kill``.
        fail: event → exception to raise there.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.events: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self.timeouts: dict[str, float | None] = {}
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.keywords: dict[str, Any] = {}
        self.chosen: dict[str, Any] = {}
        self.actor_class: Any = None
        self.actor = DoubleActor(self)

    def happens(self, event: str) -> None:
        self.events.append(event)
        if event in self.fail:
            raise self.fail[event]

    def remote(self, cls: type) -> Any:
        self.actor_class = cls
        return types.SimpleNamespace(options=self.choose)

    def choose(self, **options: Any) -> Any:
        self.chosen = options
        return types.SimpleNamespace(remote=self.create)

    def create(self, *arguments: Any, **keywords: Any) -> Any:
        self.arguments["create"], self.keywords = arguments, keywords
        self.happens("create")
        return self.actor

    def get(self, reference: str, *, timeout: float) -> Any:
        self.timeouts[reference] = timeout
        self.happens(f"get {reference}")
        return f"result of {reference}"

    def kill(self, actor: Any) -> None:
        assert actor is self.actor
        self.happens("kill")

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: NODE)


class DoubleActor:
    def __init__(self, ray: RecordedRay) -> None:
        self._ray = ray

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> str:
            self._ray.arguments[name] = arguments
            self._ray.happens(f"call {name}")
            return name

        return types.SimpleNamespace(remote=remote)


class DoubleAffinity:
    def __init__(self, node_id: str, soft: bool) -> None:
        self.node_id, self.soft = node_id, soft


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> RecordedRay:
    double = RecordedRay()
    exceptions = types.ModuleType("ray.exceptions")
    exceptions.RayError, exceptions.RayTaskError = DoubleRayError, DoubleTaskError  # type: ignore[attr-defined]
    exceptions.RayActorError, exceptions.GetTimeoutError = DoubleActorError, DoubleTimeout  # type: ignore[attr-defined]
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = DoubleAffinity  # type: ignore[attr-defined]
    for module in (double, exceptions, types.ModuleType("ray.util"), strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    return double


def spinup(section: dict[str, Any] | None = None, **changes: Any) -> NemoGymHandle:
    arguments: dict[str, Any] = {
        "base_urls": ["http://127.0.0.1:8000/v1"],
        "model_name": "policy",
        "tokenizer": TOKENIZER,
        "enable_router_replay": False,
        "use_fastokens": False,
    }
    return spinup_nemo_gym_actor({"nemo_gym": section or {}}, **{**arguments, **changes})


def config_given(ray: RecordedRay) -> NemoGymConfig:
    (config,) = ray.arguments["create"]
    return config


def test_gym_starts_first_and_gets_the_tokenizer_then(ray: RecordedRay) -> None:
    handle = spinup()
    assert ray.events == ALL_IS_WELL
    assert handle.actor is ray.actor
    assert ray.arguments["set_tokenizer"] == (TOKENIZER,)
    assert ray.actor_class is NemoGym


def test_whoever_wants_the_handle_gets_it_before_gym_starts(ray: RecordedRay) -> None:
    told: list[Any] = []

    def note(handle: NemoGymHandle) -> None:
        told.append((handle, list(ray.events)))

    assert spinup(created=note) is told[0][0]
    assert [events for _, events in told] == [["create"]]


def test_one_who_refuses_the_handle_has_no_actor(ray: RecordedRay) -> None:
    refusal = RuntimeError("given up")

    def refuse(handle: NemoGymHandle) -> None:
        raise refusal

    with pytest.raises(RuntimeError) as caught:
        spinup(created=refuse)
    assert caught.value is refusal
    assert ray.events == ["create", *CLEANED]


def test_without_a_tokenizer_none_is_set(ray: RecordedRay) -> None:
    spinup(tokenizer=None)
    assert ray.events == ALL_IS_WELL[:3]


def test_the_actor_is_never_restarted_and_runs_in_the_environment_of_its_row(ray: RecordedRay) -> None:
    spinup(env_vars={"PYTHONPATH": "/a"})
    assert ray.chosen == {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"py_executable": sys.executable, "env_vars": {"PYTHONPATH": "/a"}},
    }


@pytest.mark.parametrize("nodes", [1, 4])
def test_with_gpu_nodes_it_prefers_the_callers_node(nodes: int, ray: RecordedRay) -> None:
    spinup({"num_gpu_nodes": nodes})
    strategy = ray.chosen["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (NODE, True)
    assert config_given(ray).gym_config == {"num_gpu_nodes": nodes}


@pytest.mark.parametrize("section", [{}, {"num_gpu_nodes": 0}])
def test_without_gpu_nodes_it_runs_anywhere(section: dict, ray: RecordedRay) -> None:
    spinup(section)
    assert "scheduling_strategy" not in ray.chosen


@pytest.mark.parametrize("on", [False, True])
def test_router_replay_and_fast_tokens_reach_the_actor(on: bool, ray: RecordedRay) -> None:
    spinup(enable_router_replay=on, use_fastokens=not on)
    assert config_given(ray).require_routed_experts is on
    assert config_given(ray).use_fastokens is (not on)


def test_token_capture_reaches_the_actor(ray: RecordedRay) -> None:
    spinup(token_capture={"folder": "x"})
    assert config_given(ray).token_capture == {"folder": "x"}


def test_what_is_gyms_reaches_the_actor_exactly_and_the_callers_mapping_is_unchanged(
    ray: RecordedRay,
) -> None:
    section = {"config_paths": ["a"], "mcqa": {"x": [1]}, "max_concurrency": 8}
    spinup(section)
    assert config_given(ray).gym_config == {"config_paths": ["a"], "mcqa": {"x": [1]}}
    assert section == {"config_paths": ["a"], "mcqa": {"x": [1]}, "max_concurrency": 8}
    assert pickle.loads(pickle.dumps(config_given(ray))) == config_given(ray)


@pytest.mark.parametrize(
    ("urls", "given"),
    [
        ([], ()),
        (["http://h:1/v1", "http://h:2/v1"], ("http://h:1/v1", "http://h:2/v1")),
        (DeferredBaseUrls(("http://h:1/v1",)), DeferredBaseUrls(("http://h:1/v1",))),
    ],
)
def test_every_form_of_addresses_reaches_the_actor(urls: Any, given: Any, ray: RecordedRay) -> None:
    spinup(base_urls=urls)
    assert config_given(ray).base_urls == given


@pytest.mark.parametrize("changes", [{"base_urls": [None]}, {"model_name": ""}, {"section": {"retry": 1}}])
def test_settings_that_cannot_be_used_start_nothing(changes: dict, ray: RecordedRay) -> None:
    with pytest.raises(GymConfigError):
        spinup(**changes)
    assert ray.events == []


def test_an_environment_that_is_not_there_starts_nothing(
    ray: RecordedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "perhaps")
    with pytest.raises(ActorEnvironmentError):
        spinup()
    assert ray.events == []


def test_every_wait_has_a_deadline(ray: RecordedRay) -> None:
    handle = spinup({"start_timeout_s": 10, "shutdown_timeout_s": 7})
    handle.health_check()
    handle.shutdown()
    assert ray.timeouts == {
        "start": 10 + 120.0,
        "set_tokenizer": 120.0,
        "health_check": 120.0,
        "shutdown": 7.0 + GRACE_S + LAYER_S,
    }
    assert ray.arguments["shutdown"] == (7.0,)


# --- a start that fails ---

STARTED = ["create", "call start", "get start"]


@pytest.mark.parametrize(
    ("event", "before"),
    [
        ("create", []),
        ("call start", ["create"]),
        ("get start", ["create", "call start"]),
        ("call set_tokenizer", STARTED),
        ("get set_tokenizer", [*STARTED, "call set_tokenizer"]),
    ],
)
@pytest.mark.parametrize(
    "later",
    [
        {},
        {"call shutdown": OSError("later")},
        {"get shutdown": DoubleTimeout("later")},
        {"kill": OSError("later")},
        {"call shutdown": KeyboardInterrupt(), "kill": SystemExit()},
        {"get shutdown": KeyboardInterrupt(), "kill": KeyboardInterrupt()},
    ],
    ids=["clean", "shutdown request", "shutdown wait", "kill", "interrupts", "more interrupts"],
)
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_the_first_exception_is_raised_itself_whatever_the_cleanup_does(
    event: str, before: list[str], later: dict, kind: type[BaseException], ray: RecordedRay
) -> None:
    first = kind("first")
    ray.fail = {event: first, **later}
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        spinup()
    assert caught.value is first
    # Nothing of the cleanup shows up as if it had been the reason.
    assert first.__context__ is None
    assert first.__cause__ is None
    wanted = [*before, event]
    if event != "create":
        wanted += [step for step in CLEANED if not (step == "get shutdown" and "call shutdown" in later)]
        assert ray.events[-1] == "kill"
    assert ray.events == wanted
    if "get shutdown" in ray.events:
        assert ray.timeouts["shutdown"] == NEMO_GYM_GRACEFUL_SHUTDOWN_TIMEOUT_S == 120
        assert ray.arguments["shutdown"] == (None,)


@pytest.mark.parametrize(
    "error",
    [
        GymStartError("mcqa did not come up", component="mcqa"),
        GymHttpError("x", status=429),
        ValueError("no kind of ours"),
    ],
)
def test_what_a_method_raised_in_the_actor_arrives_itself(error: Exception, ray: RecordedRay) -> None:
    ray.fail = {"get start": DoubleTaskError(error)}
    with pytest.raises(type(error)) as caught:
        spinup()
    assert caught.value is error
    assert ray.events[-3:] == CLEANED


def test_a_deadline_and_a_death_are_typed_and_name_the_method(ray: RecordedRay) -> None:
    ray.fail = {"get start": DoubleTimeout("later")}
    with pytest.raises(GymTimeout, match="Gym's actor: start did not answer"):
        spinup()
    ray.fail = {"get start": DoubleActorError("The actor died\nmore")}
    with pytest.raises(GymServerDied, match=r"during start: The actor died .*; its Gym ends with it"):
        spinup()
    ray.fail = {"get start": DoubleRayError("the object is lost")}
    with pytest.raises(GymUnavailable, match="start was lost: DoubleRayError: the object is lost"):
        spinup()


def test_a_tokenizer_that_the_actor_cannot_load_is_a_setting_with_a_remedy(ray: RecordedRay) -> None:
    missing = DoubleTaskError(ModuleNotFoundError("No module named 'transformers'"))
    ray.fail = {"get set_tokenizer": missing}
    with pytest.raises(GymConfigError, match=r"transformers.*extra `gym` of apps/container"):
        spinup()


# --- letting go ---


def test_a_handles_shutdown_is_idempotent_and_later_calls_are_refused(ray: RecordedRay) -> None:
    handle = spinup()
    ray.events.clear()
    handle.shutdown(3.0)
    handle.shutdown()
    assert (ray.events, ray.arguments["shutdown"]) == (CLEANED, (3.0,))
    assert ray.timeouts["shutdown"] == 3.0 + GRACE_S + LAYER_S
    with pytest.raises(GymUnavailable, match="after shutdown"):
        handle.health_check()


GONE = GymTimeout("processes 7 survived SIGKILL", component="gym")


@pytest.mark.parametrize(
    ("fail", "raised"),
    [
        ({"get shutdown": DoubleTaskError(GONE)}, GONE),
        ({"get shutdown": DoubleTimeout("late")}, GymTimeout),
        ({"get shutdown": DoubleTaskError(GONE), "kill": KeyboardInterrupt()}, KeyboardInterrupt),
        ({"get shutdown": KeyboardInterrupt(), "kill": OSError("later")}, KeyboardInterrupt),
        ({"call shutdown": SystemExit(3)}, SystemExit),
        ({"kill": OSError("ray is gone")}, None),
        # It is dead: that is what was wanted.
        ({"get shutdown": DoubleActorError("dead")}, None),
    ],
)
def test_a_handles_shutdown_kills_first_and_then_says_what_went_wrong(
    fail: dict, raised: Any, ray: RecordedRay, caplog: pytest.LogCaptureFixture
) -> None:
    handle = spinup()
    ray.events.clear()
    ray.fail = fail
    if raised is None:
        handle.shutdown(1.0)
    elif isinstance(raised, type):
        with pytest.raises(raised):
            handle.shutdown(1.0)
    else:
        with pytest.raises(type(raised)) as caught:
            handle.shutdown(1.0)
        assert caught.value is raised
    assert ray.events[-1] == "kill"
    assert len(caplog.records) == len(fail)
    # It was ended, whatever was said.
    handle.shutdown(1.0)
    assert ray.events.count("kill") == 1


def test_a_session_that_ends_within_its_own_grace_is_not_said_to_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("factory", "session"):
        monkeypatch.setattr(f"rl_gym_bridge.{module}.GRACE_S", 0.6)
    monkeypatch.setattr("rl_gym_bridge.factory.LAYER_S", 0.2)

    class Slow:
        def shutdown(self, *, timeout_s: float) -> None:
            time.sleep(timeout_s + 0.4)

    session = GymSession(NemoGymConfig("policy"))
    monkeypatch.setattr(session, "_end", partial(session._end, Slow()))  # type: ignore[arg-type]
    shutdown_environments([types.SimpleNamespace(shutdown=lambda timeout_s: session._end(timeout_s))], 0.1)  # type: ignore[call-arg, arg-type]


class Environment:
    """Something with ``shutdown``, which waits for something."""

    def __init__(self, wait: Callable[[], object] = lambda: None, error: BaseException | None = None) -> None:
        self.wait, self.error = wait, error
        self.asked: list[float] = []

    def shutdown(self, timeout_s: float) -> None:
        self.asked.append(timeout_s)
        self.wait()
        if self.error is not None:
            raise self.error


def test_environments_end_at_the_same_time() -> None:
    # Nobody goes on before all of them are there.
    meeting = threading.Barrier(10)
    environments = [Environment(lambda: meeting.wait(20)) for _ in range(10)]
    shutdown_environments(environments, 25.0)
    assert [each.asked for each in environments] == [[25.0]] * 10


def test_all_are_tried_before_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    errors = [OSError("a"), None, KeyboardInterrupt("b"), None]
    environments = {
        str(index): Environment(lambda: time.sleep(0.05), error) for index, error in enumerate(errors)
    }
    with pytest.raises(OSError, match="a") as caught:
        shutdown_environments(environments, 1.0)
    assert caught.value is errors[0]
    assert [each.asked for each in environments.values()] == [[1.0]] * 4
    assert "KeyboardInterrupt('b')" in caplog.text


def test_one_that_hangs_does_not_hold_the_others_or_the_caller_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_gym_bridge.factory.GRACE_S", 0.2)
    monkeypatch.setattr("rl_gym_bridge.factory.LAYER_S", 0.0)
    released = threading.Event()
    hanging, fine = Environment(lambda: released.wait(60)), Environment()
    began = time.monotonic()
    try:
        with pytest.raises(GymTimeout, match="Environment 0: it did not end"):
            shutdown_environments([hanging, fine], 0.1)
        assert time.monotonic() - began < 20
    finally:
        released.set()
    assert fine.asked == [0.1]


def test_none_repetitions_and_raw_actors_are_understood(ray: RecordedRay) -> None:
    once = Environment()
    shutdown_environments([None, once, once, ray.actor], 2.0)
    assert once.asked == [2.0]
    assert ray.events == CLEANED
    shutdown_environments([], 1.0)
    shutdown_environments({}, 1.0)
    assert threading.active_count() < 20
