"""Engines of a fleet are killed while idle, while they serve and in a refit: real vLLM in real Ray actors."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_generation.failures import StaleWeightsError
from rl_generation.fleet.fleet import Fleet
from rl_generation.fleet.ray_replica import RayReplica
from rl_generation.fleet.ray_settings import RaySettings
from rl_generation.fleet.settings import FleetSettings, RestartPolicy
from rl_generation.protocol import Completion, GenerationRequest
from rl_generation.refit.contract import Bucket
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.settings import TransportSettings
from rl_generation.vllm.processes import descendants, wait_until_dead
from rl_generation.vllm.worker import VllmCpuWorker

tools = importlib.import_module("packages.rl-generation.tests.vllm.lab")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
N = int(os.environ.get("RL_FAULTS_N", "1"))
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
ANSWER_DEADLINE_S = 60.0
"""From a kill to all answers, whoever gave them."""
RESTART_DEADLINE_S = 180.0


class Source:
    """The weights of a new version in small buckets; something may happen between two of them."""

    def __init__(self, state: dict[str, Any], between: Callable[[], None] | None = None) -> None:
        spec = spec_of_tensors(state.items())
        self._inner = TensorSource(lambda: spec.tensors, state.items, TransportSettings(bucket_bytes=1 << 14))
        self._between = between
        self.buckets = 0

    def begin(self, transport: Any) -> Any:
        return self._inner.begin(transport)

    def next_bucket(self) -> Bucket | None:
        bucket = self._inner.next_bucket()
        self.buckets += bucket is not None
        if self.buckets == 3 and self._between is not None:
            between, self._between = self._between, None
            between()
        return bucket

    def end(self) -> None:
        self._inner.end()


class Scene:
    """Two real engines, what they should compute, and one of them to be killed."""

    def __init__(self, fleet: Fleet, reference: Any) -> None:
        self.fleet = fleet
        self.reference = reference
        self.family: set[int] = set()
        self.killed = ("", 0.0)

    def refit(self, between: Callable[[], None] | None = None) -> list[str]:
        version = self.fleet.weight_version + 1
        state = self.reference.moved(version, size=0.01)
        return self.fleet.update_from(Source(state, between), version)

    def kill(self, name: str, which: str) -> None:
        """SIGKILL the engine's own process, or the actor that it belongs to."""
        engine = self.fleet.health()["replicas"][name]["engine"]
        self.family |= {*descendants([engine["actor_pid"]]), engine["actor_pid"], engine["pid"]}
        self.killed = (f"{which} {engine[which]} of {name}", time.monotonic())
        os.kill(engine[which], signal.SIGKILL)

    def check(self, requests: list[GenerationRequest], answers: list[Completion]) -> None:
        """Each answer is to its request, of the fleet's version, and what that version's weights give."""
        assert len(answers) == len(requests)
        assert {v for a in answers for v in a.weight_versions} <= {self.fleet.weight_version}
        assert self.reference.worst(requests, answers) < 1e-4

    def ask(self, count: int = 8, tokens: int = 12) -> None:
        requests = tools.requests_of(count, tokens)
        self.check(requests, self.fleet.generate(requests))

    def becomes(self, name: str, state: str, timeout_s: float = RESTART_DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.fleet.states[name] != state:
            assert time.monotonic() < deadline, self.fleet.states
            time.sleep(0.02)

    def recover(self, name: str) -> None:
        """The killed one comes back, serves nothing, and serves again after the next refit."""
        self.becomes(name, "stale")
        member = self.fleet._core.members[name]
        before = member.tokens
        self.ask()
        with pytest.raises(StaleWeightsError):
            self.fleet._loop.call(member.replica.generate(tools.requests_of(2)), "asking", 60.0)
        assert member.tokens == before
        assert wait_until_dead(self.family, 10.0) == []
        assert self.refit() == ["vllm-0", "vllm-1"]
        self.ask()
        assert member.tokens > before
        assert self.fleet.metrics()["serving"] == 2
        who, when = self.killed
        print(f"\nkilled {who}: all as it was {time.monotonic() - when:.1f} s later", flush=True)


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


@pytest.fixture(scope="module")
def scene(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = model_folder("tied")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CLUSTER.items():
            patch.setenv(name, value)
        import ray

        # The paths of its sockets must stay short.
        scratch = tempfile.mkdtemp(prefix="rl-")
        _start_ray(scratch, cpus=2)
        replicas = [
            RayReplica(
                f"vllm-{index}",
                VllmCpuWorker,
                (tools.settings_for(folder, f"vllm-{index}", replica=index),),
                RaySettings(num_cpus=1, schedule_timeout_s=180.0),
            )
            for index in range(2)
        ]
        settings = FleetSettings(
            probe_interval_s=0.5,
            request_timeout_s=ANSWER_DEADLINE_S,
            restarts=RestartPolicy(max_restarts=1000, first_delay_s=0.05, longest_delay_s=0.1),
        )
        with Fleet(replicas, settings) as fleet:
            fleet.start()
            made = Scene(fleet, tools.Reference(folder, tmp_path_factory.mktemp("states")))
            assert made.refit() == ["vllm-0", "vllm-1"]
            made.ask()
            yield made
            print(f"\n{N} kills of each kind: {fleet.metrics()}")
            last = [facts["engine"] for facts in fleet.health()["replicas"].values()]
        left = {pid for engine in last for pid in (engine.get("pid"), engine.get("actor_pid")) if pid}
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    assert wait_until_dead(left | made.family, 10.0) == []


def victims() -> Iterator[tuple[str, str]]:
    """Replicas and processes in turn."""
    for index in range(N):
        yield f"vllm-{index % 2}", ("pid", "actor_pid")[index // 2 % 2 if N > 2 else index % 2]


def test_killed_while_idle(scene: Scene) -> None:
    for name, which in victims():
        began = time.monotonic()
        scene.kill(name, which)
        scene.ask()
        assert time.monotonic() - began < ANSWER_DEADLINE_S
        scene.recover(name)


def test_killed_while_serving(scene: Scene) -> None:
    """The caller sees nothing of it: what was lost is sampled again elsewhere."""
    for name, which in victims():
        requests = tools.requests_of(24, 90)
        again = scene.fleet.metrics()["sent_again"]
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(scene.fleet.generate, requests)
            health: Any = {}
            while health.get("in_flight", 0) == 0 and not answers.done():
                health = scene.fleet.health()["replicas"][name]["engine"]
            scene.kill(name, which)
            began = time.monotonic()
            scene.check(requests, answers.result(ANSWER_DEADLINE_S))
        assert time.monotonic() - began < ANSWER_DEADLINE_S
        assert scene.fleet.metrics()["sent_again"] >= again
        scene.recover(name)


def test_killed_in_a_refit(scene: Scene) -> None:
    """The other one completes it, with requests in flight on both."""
    for name, which in victims():
        other = {"vllm-0": "vllm-1", "vllm-1": "vllm-0"}[name]
        requests = tools.requests_of(8, 60)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(scene.fleet.generate, requests)
            assert scene.refit(lambda name=name, which=which: scene.kill(name, which)) == [other]
            answers = asking.result(ANSWER_DEADLINE_S)
        assert len(answers) == len(requests)
        # Each token is of the weights that it says, also where they changed on the way.
        assert scene.reference.worst(requests, answers) < 1e-4
        scene.recover(name)
