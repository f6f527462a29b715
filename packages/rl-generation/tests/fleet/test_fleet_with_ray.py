"""Replicas as real Ray actors. The engine in them is a double; processes, deaths and errors are real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_generation.failures import (
    ContextOverflowError,
    DeadlineError,
    EngineDeadError,
    GenerationError,
    StaleWeightsError,
    UnschedulableError,
)
from rl_generation.fleet.fleet import Fleet
from rl_generation.fleet.ray_replica import RayReplica
from rl_generation.fleet.ray_settings import RaySettings
from rl_generation.fleet.replica import ReplicaFacts
from rl_generation.fleet.settings import FleetSettings, RestartPolicy
from rl_generation.protocol import Completion, GenerationRequest, RefitSpec, SamplingParams
from rl_generation.refit.contract import Bucket, RefitAck, manifest_digest

pytestmark = pytest.mark.slow

ENVIRONMENT = "rl_generation_tests.EngineDouble"
CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_process_group_cleanup_enabled": "1",
    "RAY_prestart_worker_first_driver": "0",
    # By default actors run at niceness 15 and starve beside whatever else a machine does.
    "RAY_worker_niceness": "0",
    # Keeps the cluster of this machine on its loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RL_ACTOR_ENVS_SYSTEM": "1",
}
FAST = FleetSettings(
    probe_interval_s=0.2,
    probe_timeout_s=5.0,
    request_timeout_s=60.0,
    restarts=RestartPolicy(first_delay_s=0.05, longest_delay_s=0.1, max_restarts=50),
)


class EngineDouble:
    """A double of an engine's actor; a prompt's first token says what becomes of it."""

    def __init__(self, child: bool = False) -> None:
        self._child = child
        self._version = 0
        self._stale = False
        self._sampled = 0
        self._socket: socket.socket | None = None
        self._target: tuple[RefitSpec, int] | None = None
        self._came: list[Any] = []

    async def reserve(self, port: int = 0) -> str | None:
        if self._socket is not None:
            return self._url()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        return self._url()

    def _url(self) -> str:
        assert self._socket is not None
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    async def start(self, *, stale: bool = False) -> ReplicaFacts:
        self._stale = stale
        if self._child:
            import subprocess

            subprocess.Popen(["sleep", "300"])
        return ReplicaFacts(64, 100, self._version, os.getpid())

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        if self._stale:
            raise StaleWeightsError("the double is stale")
        for request in requests:
            match request.prompt_token_ids[0]:
                case 90:
                    raise ContextOverflowError("double", 698, 512)
                case 91:
                    raise KeyError("a bug")
                case 92:
                    os._exit(3)
                case 93:
                    await asyncio.sleep(3600)
                case 94:
                    await asyncio.sleep(0.2)
                case 95:
                    time.sleep(3600)
        self._sampled += len(requests)
        return [Completion(r.prompt_token_ids, (-1.0,), "stop", self._version) for r in requests]

    async def probe(self) -> None:
        if self._stale:
            raise StaleWeightsError("the double is stale")

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        self._target, self._came = (spec, version), []

    async def load_bucket(self, bucket: Bucket) -> None:
        self._came += bucket.tensors

    async def finish_refit(self) -> RefitAck:
        assert self._target is not None
        spec, self._version = self._target
        assert len(self._came) == len(spec.tensors)
        self._stale = False
        return RefitAck("double", self._version, manifest_digest(spec))

    async def abort_refit(self) -> None:
        self._stale = True

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...

    async def health(self) -> dict[str, Any]:
        return {"sampled_tokens": self._sampled, "pid": os.getpid()}

    async def shutdown(self, timeout_s: float) -> None:
        self._sampled = -1


def _start_ray(scratch: str, cpus: int) -> None:
    import ray

    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=80 * 2**20,
                log_to_driver=False,
                _temp_dir=scratch,
            )
            return
        except Exception:
            # Ray gives a node 30 s to start, however busy the machine is.
            ray.shutdown()
            if attempt == 2:
                raise


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray of this machine with 4 CPUs and no GPU, for the tests of this file."""
    from rl_actor_envs.registry import register_actor_environment

    with pytest.MonkeyPatch.context() as patch:
        for name, value in CLUSTER.items():
            patch.setenv(name, value)
        register_actor_environment(ENVIRONMENT, None)
        import ray

        # The paths of its sockets must stay short.
        scratch = tempfile.mkdtemp(prefix="rl-")
        _start_ray(scratch, cpus=4)
        yield
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def settings(**changes: Any) -> RaySettings:
    return RaySettings(**{"environment": ENVIRONMENT, "num_cpus": 0.5, **changes})


def replica(name: str = "double-0", *arguments: Any, **changes: Any) -> RayReplica:
    return RayReplica(name, EngineDouble, arguments, settings(**changes))


def ask(first: int) -> list[GenerationRequest]:
    return [GenerationRequest((first,), SamplingParams(max_new_tokens=1))]


def running(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in lists for child in file.read_text().split()]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_f8_an_actor_that_no_node_can_hold_is_refused_at_once() -> None:
    """1 GPU on a cluster without one: actor, what it asks for, and what the node has; within the deadline."""

    async def scene() -> None:
        began = time.monotonic()
        with pytest.raises(UnschedulableError) as caught:
            await replica(num_gpus=1, schedule_timeout_s=10.0).start()
        assert time.monotonic() - began < 10.0
        text = str(caught.value)
        assert "replica double-0" in text
        assert f"{EngineDouble.__module__}.EngineDouble" in text
        assert "asks for 0.5 CPU, 1 GPU" in text
        assert "node 127.0.0.1" in text
        assert "has 4 CPU" in text

    asyncio.run(scene())


def test_f8_an_actor_that_waits_for_room_has_a_deadline() -> None:
    async def scene() -> None:
        began = time.monotonic()
        waiting = replica(num_gpus=1, schedule_timeout_s=5.0, nodes_may_join=True)
        with pytest.raises(UnschedulableError, match=r"did not run within 5 s; node 127\.0\.0\.1.*4 CPU"):
            await waiting.start()
        assert time.monotonic() - began < 10.0

    asyncio.run(scene())


def test_calls_have_deadlines_and_failures_keep_their_class() -> None:
    async def scene() -> None:
        one = replica(generate_timeout_s=3.0)
        try:
            with pytest.raises(EngineDeadError, match=r"generate: it has no process; start\(\) makes one"):
                await one.generate(ask(1))
            address = await one.reserve()
            facts = await one.start()
            assert facts.max_context == 64
            assert [c.token_ids for c in await one.generate(ask(5))] == [(5,)]
            with pytest.raises(ContextOverflowError) as overflow:
                await one.generate(ask(90))
            assert (overflow.value.prompt_tokens, overflow.value.max_context) == (698, 512)
            with pytest.raises(GenerationError, match="generate failed: KeyError: 'a bug'") as bug:
                await one.generate(ask(91))
            assert (bug.value.kind, type(bug.value.__cause__)) == ("data", KeyError)
            with pytest.raises(DeadlineError, match="replica double-0: generate did not answer within 3 s"):
                await one.generate(ask(93))
            # It is free again, since nobody waits for that answer.
            assert [c.token_ids for c in await one.generate(ask(6))] == [(6,)]
            with pytest.raises(EngineDeadError, match="replica double-0: it died during generate"):
                await one.generate(ask(92))
            again = await one.start(stale=True)
            assert again.pid != facts.pid
            assert await one.reserve() == address
            with pytest.raises(StaleWeightsError):
                await one.generate(ask(1))
        finally:
            await one.shutdown(5.0)
        assert not running(again.pid)
        await one.shutdown(5.0)

    asyncio.run(scene())


def test_killing_leaves_nothing_of_a_process_that_hears_nothing() -> None:
    async def scene() -> None:
        one = replica("double-0", True, kill_timeout_s=4.0)
        pid = (await one.start()).pid
        below = children(pid)
        assert below
        os.kill(pid, signal.SIGSTOP)
        await one.kill()
        assert not running(pid)
        wait_for(lambda: not any(map(running, below)))
        await one.kill()

    asyncio.run(scene())


def test_f4_a_fleet_of_actors_outlives_the_death_of_one(source) -> None:
    """Transparent while it happens, then stale, serving after the next refit; nothing is left at the end."""
    names = [f"double-{i}" for i in range(3)]
    with Fleet([replica(name) for name in names], FAST) as fleet:
        assert len(set(fleet.reserve())) == 3
        fleet.start()
        assert fleet.update_from(source(), 1) == names
        pids = {name: facts["pid"] for name, facts in fleet.health()["replicas"].items()}
        os.kill(pids["double-1"], signal.SIGKILL)
        answers = [fleet.generate(ask(1 + i % 80))[0] for i in range(100)]
        assert [a.token_ids for a in answers] == [(1 + i % 80,) for i in range(100)]
        assert {a.weight_version for a in answers} == {1}
        assert fleet.metrics()["failed_calls"] <= 3
        wait_for(lambda: fleet.states["double-1"] == "stale")
        assert fleet.metrics()["serving"] == 2
        assert {a.weight_version for a in fleet.generate([ask(94)[0] for _ in range(40)])} == {1}
        assert fleet.update_from(source(), 2) == names
        assert fleet.metrics()["serving"] == 3
        assert {a.weight_version for a in fleet.generate([ask(7)[0] for _ in range(40)])} == {2}
        pids |= {f"{name} later": facts["pid"] for name, facts in fleet.health()["replicas"].items()}
        # A frozen process is found by probes, although Ray says that it lives.
        frozen = fleet.health()["replicas"]["double-2"]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        assert len(fleet.generate([ask(8)[0] for _ in range(40)])) == 40
        wait_for(lambda: fleet.states["double-2"] == "stale")
        pids["double-2 last"] = fleet.health()["replicas"]["double-2"]["pid"]
    assert [name for name, pid in pids.items() if running(pid)] == []
