"""The factory with a real Ray cluster: real actors, real errors across it, and real deaths.

Gym itself is a double: processes that start, serve and die as Gym's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.actor_handle import NemoGymHandle
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


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """A Ray of this machine, for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        import ray

        # The paths of its sockets must stay short.
        scratch = tempfile.mkdtemp(prefix="rl-")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            _temp_dir=scratch,
        )
        yield ray
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
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


@pytest.fixture
def spinup() -> Iterator[Callable[..., NemoGymHandle]]:
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

    yield make
    shutdown_environments(made, 10.0)


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


def test_rollouts_through_a_real_actor_stream_as_they_finish(
    spinup: Callable[..., NemoGymHandle], other_gym: Callable[..., str]
) -> None:
    tokenizer = ByteTokenizer()
    handle = spinup(head_url=other_gym(), tokenizer=tokenizer, token_capture={"folder": "x"})
    assert handle.health_check().agents == ("the_agent",)
    arrived: dict[str, float] = {}

    async def stream() -> list[RolloutResult]:
        began = time.monotonic()
        results = []
        async for result in handle.run_rollouts([request(0, hang_s=1.5), request(1), request(2, status=429)]):
            arrived[result.request.rollout_id] = time.monotonic() - began
            results.append(result)
        return results

    results = {result.request.rollout_id: result for result in asyncio.run(stream())}
    assert arrived["r1"] < 1.2 < arrived["r0"]
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
    status: int, kind: FailureKind, spinup: Callable[..., NemoGymHandle], other_gym: Callable[..., str]
) -> None:
    with pytest.raises(GymHttpError) as caught:
        spinup(head_url=other_gym(str(status)))
    error = caught.value
    assert type(error) is GymHttpError
    assert (error.status, error.kind, error.component) == (status, kind, "head server")
    assert "the_agent" in error.body


def test_the_actors_options_are_those_of_the_factory(
    cluster: Any, spinup: Callable[..., NemoGymHandle], other_gym: Callable[..., str]
) -> None:
    """With and without nodes of its own it runs on this one node; a call is never repeated by Ray."""
    head = other_gym()
    for nodes in (0, 1):
        handle = spinup({"num_gpu_nodes": nodes}, head_url=head)
        assert isinstance(run(handle, request())[0].outcome, Trajectory)
        handle.shutdown()
        handle.shutdown()
        with pytest.raises(GymUnavailable, match="after shutdown"):
            run(handle, request())


def test_leaving_the_stream_early_ends_what_runs(
    spinup: Callable[..., NemoGymHandle], other_gym: Callable[..., str]
) -> None:
    handle = spinup(head_url=other_gym())

    async def first() -> str:
        stream = handle.run_rollouts([request(0), *(request(n, hang_s=6) for n in range(1, 5))])
        async with contextlib.aclosing(stream) as results:  # type: ignore[type-var]
            async for result in results:
                return result.request.rollout_id
        raise AssertionError

    assert asyncio.run(first()) == "r0"
    # The actor itself is free again, and serves.
    began = time.monotonic()
    assert isinstance(run(handle, request())[0].outcome, Trajectory)
    assert time.monotonic() - began < 4


def test_i6_a_killed_actor_is_a_typed_error_within_a_second_and_takes_its_gym_along(
    spinup: Callable[..., NemoGymHandle], gym_python: str, tmp_path: Path
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


def test_a_dead_server_of_gym_is_named_at_the_driver(
    spinup: Callable[..., NemoGymHandle], gym_python: str, tmp_path: Path
) -> None:
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
    spinup: Callable[..., NemoGymHandle], gym_python: str, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    section = {"python": gym_python, "work_dir": str(work)}
    with pytest.raises(GymStartError, match=r"answers") as caught:
        spinup({**section, "start_timeout_s": 3.0, "double": {"servers": {"answers": {"status": 503}}}})
    assert type(caught.value) is GymStartError
    wait_until(lambda: not gym_processes(work), 5.0)
    with pytest.raises(GymConfigError, match="no such program"):
        spinup({"python": str(tmp_path / "nowhere"), "work_dir": str(work)})


def test_a_tokenizer_without_decode_ends_the_gym_that_was_started(
    spinup: Callable[..., NemoGymHandle], gym_python: str, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    with pytest.raises(GymConfigError, match="int has no decode"):
        spinup({"python": gym_python, "work_dir": str(work)}, tokenizer=3)
    wait_until(lambda: not gym_processes(work), 5.0)


def test_a_tokenizer_of_a_package_that_the_actor_lacks_is_told_with_the_remedy(
    spinup: Callable[..., NemoGymHandle], other_gym: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_here = types.ModuleType("only_in_the_driver")
    exec("class Tokenizer:\n    def decode(self, ids): return ''", only_here.__dict__)
    monkeypatch.setitem(sys.modules, only_here.__name__, only_here)
    with pytest.raises(GymConfigError, match=r"only_in_the_driver.*extra `gym` of apps/container"):
        spinup(head_url=other_gym(), tokenizer=only_here.Tokenizer())


def test_environments_end_together_and_leave_nothing(
    spinup: Callable[..., NemoGymHandle], gym_python: str, tmp_path: Path
) -> None:
    handles = [spinup({"python": gym_python, "work_dir": str(tmp_path / f"work{n}")}) for n in range(2)]
    assert all(gym_processes(tmp_path / f"work{n}") for n in range(2))
    began = time.monotonic()
    shutdown_environments({str(index): handle for index, handle in enumerate(handles)}, 10.0)
    assert time.monotonic() - began < 10
    for number in range(2):
        wait_until(lambda work=tmp_path / f"work{number}": not gym_processes(work), 5.0)


def test_a_stream_that_gives_nothing_in_time_is_a_timeout(
    spinup: Callable[..., NemoGymHandle], other_gym: Callable[..., str]
) -> None:
    handle = spinup(head_url=other_gym())
    impatient = NemoGymHandle(handle.actor, stall_timeout_s=0.5)
    with pytest.raises(GymTimeout, match=r"run_rollouts gave no result for 0\.5 s"):
        run(impatient, request(hang_s=5))
