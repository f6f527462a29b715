"""The factory with a real Ray cluster: real actors, real errors across it, and real deaths.

Gym itself is a double: processes that start, serve and die as Gym's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.actor import NemoGym
from rl_gym_bridge.actor_handle import NemoGymHandle
from rl_gym_bridge.config import NemoGymConfig
from rl_gym_bridge.factory import shutdown_environments, spinup_nemo_gym_actor
from rl_gym_bridge.failures import (
    GymConfigError,
    GymHttpError,
    GymServerDied,
    GymStartError,
    GymTimeout,
    GymUnavailable,
)
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.testing.byte_tokenizer import ByteTokenizer
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, Trajectory

pytestmark = pytest.mark.slow

DOUBLES = Path(__file__).parent / "doubles"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    # Keeps the cluster of this machine on its loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RL_ACTOR_ENVS_SYSTEM": "1",
}


Spinup = Callable[..., NemoGymHandle]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """A Ray of this machine, for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        import ray

        # The paths of its sockets must stay short.
        scratch = tempfile.mkdtemp(prefix="rl-")
        started = False
        for _ in range(3):
            # Ray gives a node 30 s to start, however busy the machine is.
            try:
                ray.init(
                    address="local",
                    num_cpus=2,
                    include_dashboard=False,
                    object_store_memory=80 * 2**20,
                    log_to_driver=False,
                    _temp_dir=scratch,
                )
            except Exception as error:
                print(f"no cluster yet: {error}")
                ray.shutdown()
            else:
                started = True
                break
        assert started
        yield ray
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="module")
def other_gym() -> Iterator[Callable[..., str]]:
    """Starts Gyms to attach to; gives the head server's address."""
    made = []

    def start(*arguments: str) -> str:
        command = [sys.executable, str(DOUBLES / "gym_http.py"), *arguments]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout is not None
        return made[-1].stdout.readline().strip()

    yield start
    for process in made:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture
def gym_python(tmp_path: Path) -> str:
    """An interpreter that says it has Gym 0.4.0, whose command is the double."""
    folder = tmp_path / "gym" / "bin"
    folder.mkdir(parents=True)
    facts = {"python": [3, 12, 1], "version": "0.4.0", "prefix": str(tmp_path / "gym")}
    said = json.dumps({**facts, "found": True, "checkout": False})
    (folder / "python").write_text(
        f"#!/bin/sh\ncase \"$*\" in *importlib.metadata*) echo '{said}' ;; "
        f'*) exec {sys.executable} "$@" ;; esac\n'
    )
    (folder / "gym").write_text((DOUBLES / "gym_command.py").read_text())
    for name in ("python", "gym"):
        (folder / name).chmod(0o755)
    return str(folder / "python")


@contextlib.contextmanager
def spinning_up() -> Iterator[Spinup]:
    """Makes actors, which end with the block."""
    made: list[NemoGymHandle] = []

    def make(section: dict[str, Any] | None = None, **changes: Any) -> NemoGymHandle:
        arguments: dict[str, Any] = {
            "base_urls": [],
            "model_name": "policy",
            "tokenizer": None,
            "enable_router_replay": False,
            "use_fastokens": False,
        }
        settings = {"start_timeout_s": 20.0, "shutdown_timeout_s": 3.0, "retry": {"infra_attempts": 1}}
        made.append(
            spinup_nemo_gym_actor({"nemo_gym": {**settings, **(section or {})}}, **{**arguments, **changes})
        )
        return made[-1]

    try:
        yield make
    finally:
        shutdown_environments(made, 10.0)


@pytest.fixture
def spinup() -> Iterator[Spinup]:
    with spinning_up() as make:
        yield make


@pytest.fixture(scope="module")
def attached(other_gym: Callable[..., str]) -> Iterator[tuple[NemoGymHandle, str]]:
    """An actor with a tokenizer that no test harms, and the head server of the Gym that it is attached to."""
    head = other_gym()
    with spinning_up() as make:
        yield make(head_url=head, tokenizer=ByteTokenizer()), head


def request(number: int = 0, agent: str = "the_agent", **wanted: Any) -> RolloutRequest:
    return RolloutRequest(f"r{number}", "g", "row", agent, {"wanted": wanted})


async def collected(handle: NemoGymHandle, *requests: RolloutRequest) -> list[RolloutResult]:
    return [result async for result in handle.run_rollouts(requests)]


def run(handle: NemoGymHandle, *requests: RolloutRequest) -> list[RolloutResult]:
    return asyncio.run(collected(handle, *requests))


def pid_of(handle: NemoGymHandle) -> int:
    """The process of the actor."""
    import ray

    return ray.get(handle.actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30)


def gym_processes(folder: Path) -> list[int]:
    """Every process that works in this folder, Gym's daemons, too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                working = os.readlink(entry / "cwd")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if working.startswith(f"{folder}/gym-") and state not in "ZX":
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come about in time"
        time.sleep(0.01)
    return time.monotonic() - began


def test_rollouts_through_a_real_actor_stream_as_they_finish(attached: tuple[NemoGymHandle, str]) -> None:
    tokenizer = ByteTokenizer()
    handle, _ = attached
    assert handle.health_check().agents == ("the_agent",)
    arrived: dict[str, float] = {}

    async def stream() -> list[RolloutResult]:
        began = time.monotonic()
        results = []
        async for result in handle.run_rollouts([request(0, hang_s=3.0), request(1), request(2, status=429)]):
            arrived[result.request.rollout_id] = time.monotonic() - began
            results.append(result)
        return results

    results = {result.request.rollout_id: result for result in asyncio.run(stream())}
    assert arrived["r1"] + 0.5 < arrived["r0"]
    assert isinstance(results["r0"].outcome, Trajectory)
    assert results["r0"].outcome.token_ids == (1, 2, 3, 4)
    assert results["r1"].answer is not None
    (item,) = results["r1"].answer["response"]["output"]
    assert (item["prompt_str"], item["generation_str"]) == (
        tokenizer.decode([1, 2]),
        tokenizer.decode([3, 4]),
    )
    failed = results["r2"].outcome
    assert isinstance(failed, RolloutFailure)
    assert failed.kind is FailureKind.INFRA


@pytest.mark.parametrize(
    ("status", "kind"), [(429, FailureKind.INFRA), (500, FailureKind.INFRA), (400, FailureKind.DATA)]
)
def test_k10_an_error_crosses_the_actor_with_its_class_status_and_kind(
    status: int, kind: FailureKind, spinup: Spinup, other_gym: Callable[..., str]
) -> None:
    with pytest.raises(GymHttpError) as caught:
        spinup(head_url=other_gym(str(status)))
    error = caught.value
    assert type(error) is GymHttpError
    assert (error.status, error.kind, error.component) == (status, kind, "head server")
    assert "the_agent" in error.body


@pytest.mark.parametrize("began", [False, True])
def test_a_stream_of_an_actor_that_does_not_run_raises_the_bridges_own_class(
    began: bool, cluster: Any, other_gym: Callable[..., str]
) -> None:
    """Ray's own exception is of a class of both, which no other process can unpickle."""
    actor = cluster.remote(NemoGym).remote(NemoGymConfig("policy"), head_url=other_gym())
    if began:
        cluster.get(actor.start.remote(), timeout=60)
        cluster.get(actor.shutdown.remote(), timeout=60)
    with pytest.raises(cluster.exceptions.RayTaskError) as raw:
        cluster.get(actor.health_check.remote(), timeout=60)
    assert type(raw.value) is not GymUnavailable
    assert isinstance(raw.value, GymUnavailable)
    try:
        with pytest.raises(GymUnavailable) as caught:
            run(NemoGymHandle(actor), request())
        error = caught.value
        assert type(error) is GymUnavailable
        assert error.problem == ("it is shut down" if began else "it is not started")
        assert "Traceback" not in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.kind) == (GymUnavailable, str(error), FailureKind.INFRA)
    finally:
        cluster.kill(actor)


@pytest.mark.parametrize(
    ("status", "kind"), [(429, FailureKind.INFRA), (500, FailureKind.INFRA), (400, FailureKind.DATA)]
)
def test_k10_an_error_crosses_the_stream_with_its_class_status_and_kind(
    status: int, kind: FailureKind, cluster: Any
) -> None:
    actor = raising(
        cluster,
        GymHttpError(f"answered {status}", status=status, body="why", component="the_agent", attempts=3),
    )
    try:
        with pytest.raises(GymHttpError) as caught:
            run(NemoGymHandle(actor), request())
        for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
            assert type(error) is GymHttpError
            assert (error.status, error.kind, error.body) == (status, kind, "why")
            assert (error.component, error.attempts) == ("the_agent", 3)
            assert str(error) == f"the_agent: answered {status}"
    finally:
        cluster.kill(actor)


def raising(ray: Any, error: Exception) -> Any:
    """An actor whose stream gives one result and then ends with ``error``."""

    # Pickled by value: workers know no module of a test.
    class Raises:
        async def run_rollouts(self, requests: list[Any]) -> AsyncIterator[Any]:
            yield requests[0]
            raise error

    return ray.remote(Raises).remote()


def test_a_timeout_that_the_actor_raised_is_not_taken_for_a_stall(cluster: Any) -> None:
    actor = raising(cluster, TimeoutError("of the actor"))
    try:
        with pytest.raises(TimeoutError, match="of the actor") as caught:
            run(NemoGymHandle(actor), request())
        assert type(caught.value) is TimeoutError
    finally:
        cluster.kill(actor)


def test_the_actors_options_are_those_of_the_factory(
    cluster: Any, spinup: Spinup, other_gym: Callable[..., str]
) -> None:
    """As Ray's own table of actors has them, with and without nodes of its own: no restart, no CPU."""
    head = other_gym()
    here = cluster.get_runtime_context().get_node_id()
    for nodes in (0, 1):
        handle = spinup({"num_gpu_nodes": nodes}, head_url=head)
        listed = actor_table(cluster, handle)
        assert listed.max_restarts == 0
        assert listed.num_restarts == 0
        assert dict(listed.required_resources) == {}
        assert listed.address.node_id.hex() == here
        assert isinstance(run(handle, request())[0].outcome, Trajectory)
        handle.shutdown()
        handle.shutdown()
        with pytest.raises(GymUnavailable, match="after shutdown"):
            run(handle, request())


def actor_table(ray: Any, handle: NemoGymHandle) -> Any:
    """What Ray has about the actor."""
    from ray.core.generated import gcs_pb2

    accessor = ray._private.state.state._connect_and_get_accessor()
    return gcs_pb2.ActorTableData.FromString(accessor.get_actor_info(handle.actor._actor_id))


def test_token_capture_and_fast_tokens_reach_the_actor(spinup: Spinup, other_gym: Callable[..., str]) -> None:
    handle = spinup(head_url=other_gym(), token_capture={"folder": "x"}, use_fastokens=True)
    assert handle.call("settings") == {"token_capture": {"folder": "x"}, "use_fastokens": True}


def running_at(head_url: str) -> int:
    """How many rollouts the agent of an other's Gym is busy with."""
    (agent,) = json.loads(urllib.request.urlopen(f"{head_url}/server_instances", timeout=5).read())
    return int(urllib.request.urlopen(f"{agent['url']}/running", timeout=5).read())


def test_leaving_the_stream_early_ends_what_runs(attached: tuple[NemoGymHandle, str]) -> None:
    handle, head = attached

    async def first() -> str:
        stream = handle.run_rollouts([request(0), *(request(n, hang_s=60) for n in range(1, 5))])
        async with contextlib.aclosing(stream) as results:  # type: ignore[type-var]
            async for result in results:
                assert await asyncio.to_thread(wait_until, lambda: running_at(head) == 4, 5.0) >= 0
                return result.request.rollout_id
        raise AssertionError

    assert asyncio.run(first()) == "r0"
    # Neither the actor nor Gym goes on with it.
    wait_until(lambda: running_at(head) == 0, 5.0)
    assert isinstance(run(handle, request())[0].outcome, Trajectory)


def test_giving_a_stream_up_that_stalls_ends_what_runs(attached: tuple[NemoGymHandle, str]) -> None:
    handle, head = attached
    with pytest.raises(GymTimeout, match=r"run_rollouts gave no result for 1 s"):
        run(NemoGymHandle(handle.actor, stall_timeout_s=1.0), request(hang_s=60))
    wait_until(lambda: running_at(head) == 0, 5.0)


def test_what_cannot_be_fetched_is_no_stall_and_ends_what_runs(
    attached: tuple[NemoGymHandle, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, head = attached

    async def never(reference: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("rl_gym_bridge.actor_handle.CALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr("rl_gym_bridge.actor_handle._value", never)
    with pytest.raises(GymTimeout, match=r"a result of run_rollouts did not arrive for 1 s"):
        run(handle, request(0), request(1, hang_s=60))
    wait_until(lambda: running_at(head) == 0, 5.0)


def test_an_error_of_the_drivers_own_ends_what_runs(
    cluster: Any, attached: tuple[NemoGymHandle, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, head = attached

    async def fails(reference: Any) -> None:
        raise cluster.exceptions.RaySystemError("a result cannot be unpickled")

    monkeypatch.setattr("rl_gym_bridge.actor_handle._value", fails)
    with pytest.raises(GymUnavailable, match="run_rollouts was lost: RaySystemError"):
        run(handle, request(0), request(1, hang_s=60))
    wait_until(lambda: running_at(head) == 0, 5.0)


def test_i6_a_killed_actor_is_a_typed_error_within_a_second_and_takes_its_gym_along(
    spinup: Spinup, gym_python: str, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    handle = spinup({"python": gym_python, "work_dir": str(work)})
    assert handle.health_check().servers == ("answers", "answers_agent", "policy_model")
    family = gym_processes(work)
    assert len(family) >= 4
    victim = pid_of(handle)
    took: list[float] = []

    async def killed_meanwhile() -> None:
        rollouts = asyncio.ensure_future(collected(handle, request(agent="answers_agent")))
        await asyncio.sleep(1.0)
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        try:
            await rollouts
        finally:
            took.append(time.monotonic() - began)

    with pytest.raises(GymServerDied, match="Gym's actor: it died before or during run_rollouts"):
        asyncio.run(killed_meanwhile())
    began = time.monotonic()
    with pytest.raises(GymServerDied):
        handle.health_check()
    took.append(time.monotonic() - began)
    began = time.monotonic()
    with pytest.raises(GymServerDied):
        run(handle, request(agent="answers_agent"))
    took.append(time.monotonic() - began)
    gone = wait_until(lambda: not gym_processes(work), 5.0)
    print(f"typed after {', '.join(f'{seconds:.3f}' for seconds in took)} s; Gym gone after {gone:.2f} s")
    assert max(took) < 1.0
    # A dead actor is let go like any other.
    handle.shutdown()


def test_a_dead_server_of_gym_is_named_at_the_driver(spinup: Spinup, gym_python: str, tmp_path: Path) -> None:
    handle = spinup({"python": gym_python, "work_dir": str(tmp_path / "work")})
    victim = next(
        pid
        for pid in gym_processes(tmp_path / "work")
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        in {str(parent) for parent in gym_processes(tmp_path / "work")}
    )
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: _raises(handle.health_check), 5.0)
    with pytest.raises(GymServerDied) as caught:
        handle.health_check()
    assert caught.value.component
    assert caught.value.kind is FailureKind.INFRA


def _raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except GymServerDied:
        return True
    return False


def test_a_gym_that_does_not_start_leaves_neither_actor_nor_process(
    spinup: Spinup, gym_python: str, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    section = {"python": gym_python, "work_dir": str(work)}
    with pytest.raises(GymStartError, match=r"answers") as caught:
        spinup({**section, "double": {"servers": {"answers": {"exit_at_start": 1}}}})
    assert type(caught.value) is GymStartError
    wait_until(lambda: not gym_processes(work), 5.0)
    with pytest.raises(GymConfigError, match="no such program"):
        spinup({"python": str(tmp_path / "nowhere"), "work_dir": str(work)})


def test_a_tokenizer_without_decode_ends_the_gym_that_was_started(
    spinup: Spinup, gym_python: str, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    with pytest.raises(GymConfigError, match="int has no decode"):
        spinup({"python": gym_python, "work_dir": str(work)}, tokenizer=3)
    wait_until(lambda: not gym_processes(work), 5.0)


def test_a_tokenizer_of_a_package_that_the_actor_lacks_is_told_with_the_remedy(
    spinup: Spinup, other_gym: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_here = types.ModuleType("only_in_the_driver")
    exec("class Tokenizer:\n    def decode(self, ids): return ''", only_here.__dict__)
    monkeypatch.setitem(sys.modules, only_here.__name__, only_here)
    with pytest.raises(GymConfigError, match=r"only_in_the_driver.*extra `gym` of apps/container"):
        spinup(head_url=other_gym(), tokenizer=only_here.Tokenizer())


def test_environments_end_together_and_leave_nothing(spinup: Spinup, gym_python: str, tmp_path: Path) -> None:
    handles = [spinup({"python": gym_python, "work_dir": str(tmp_path / f"work{n}")}) for n in range(2)]
    assert all(gym_processes(tmp_path / f"work{n}") for n in range(2))
    began = time.monotonic()
    shutdown_environments({str(index): handle for index, handle in enumerate(handles)}, 10.0)
    assert time.monotonic() - began < 10
    for number in range(2):
        wait_until(lambda work=tmp_path / f"work{number}": not gym_processes(work), 5.0)


def test_gym_looks_where_it_is_told_to_and_not_where_its_actor_works(
    gym_python: str, spinup: Spinup, tmp_path: Path
) -> None:
    (tmp_path / "mine" / "resources_servers" / "answers").mkdir(parents=True)
    work = tmp_path / "work"
    spinup({"python": gym_python, "work_dir": str(work), "search_folder": str(tmp_path / "mine")})
    (folder,) = work.iterdir()
    assert (folder / "resources_servers").resolve() == tmp_path / "mine" / "resources_servers"


def test_a_gym_that_starts_is_shut_down_from_another_thread(gym_python: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    section = {"python": gym_python, "work_dir": str(work), "double": {"list_after_s": 60}}
    begun: queue.Queue[NemoGymHandle] = queue.Queue()
    with spinning_up() as spinup, ThreadPoolExecutor(1) as pool:
        start = pool.submit(spinup, {**section, "start_timeout_s": 60.0}, created=begun.put)
        handle = begun.get(timeout=30)
        wait_until(lambda: bool(gym_processes(work)), 30)
        handle.shutdown()
        with pytest.raises((GymStartError, GymServerDied)):
            start.result(timeout=30)
    wait_until(lambda: not gym_processes(work), 10)
