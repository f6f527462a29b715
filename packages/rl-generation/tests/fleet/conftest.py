"""An event loop whose clock jumps to the next timer, and doubles of replicas and of a source of weights."""

from __future__ import annotations

import asyncio
import functools
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from rl_generation.failures import EngineDeadError, StaleWeightsError
from rl_generation.fleet.core import FleetCore
from rl_generation.fleet.replica import ReplicaFacts
from rl_generation.fleet.settings import FleetSettings, RestartPolicy
from rl_generation.protocol import Completion, GenerationRequest, RefitSpec, RefitTensor, SamplingParams
from rl_generation.refit.contract import Bucket, RefitAck, TensorPlace, manifest_digest

SPEC = RefitSpec(tuple(RefitTensor(f"layer.{i}.weight", (2, 2), torch.float32) for i in range(3)))


class _Jumping(selectors.DefaultSelector):
    """Instead of sleeping, adds the time to ``now``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        # What a thread works on takes real time.
        if any(thread.name.startswith("fleet: ") for thread in threading.enumerate()):
            return super().select(0.002 if timeout is None else min(timeout, 0.002))
        events = super().select(0)
        if not events and timeout:
            self.now += timeout
        assert events or timeout is not None, "everything waits for something that never comes"
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs timers in their order without waiting for them."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine to its end in virtual time."""

    def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(work)

    return run_virtually


class ScriptedReplica:
    """A double of a replica that does as it is told, and does *not* refuse to serve old weights.

    Attributes:
        alive: otherwise every call says that the engine is dead.
        hung: calls that sample never return.
        latency_s: of a call of generate.
        version: of its weights.
        faults: method -> errors that its next calls raise.
        hangs: methods that never return.
        calls: method -> how often it was called.
        served: state of the fleet's machine and version at each request that came.
    """

    def __init__(self, name: str, url: str | None = None) -> None:
        self.name = name
        self.url = url
        self.alive = False
        self.hung = False
        self.latency_s = 0.01
        self.start_s = 0.01
        self.version = 0
        self.told_stale: list[bool] = []
        self.faults: dict[str, list[Exception]] = {}
        self.hangs: set[str] = set()
        self.calls: dict[str, int] = {}
        self.served: list[tuple[str, int]] = []
        self.facts: dict[str, Any] = {}
        self.state_of: Callable[[], str] = lambda: "healthy"
        self.wrong_digest = False
        self._target: tuple[RefitSpec, int] | None = None
        self._came: list[RefitTensor] = []

    async def _enter(self, method: str, *, needs_life: bool = True) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if method in self.hangs:
            await asyncio.Event().wait()
        if faults := self.faults.get(method):
            raise faults.pop(0)
        if needs_life and not self.alive:
            raise EngineDeadError(f"{self.name}: {method}: the process is gone")

    async def reserve(self) -> str | None:
        await self._enter("reserve", needs_life=False)
        return self.url

    async def start(self, *, stale: bool = False) -> ReplicaFacts:
        await self._enter("start", needs_life=False)
        await asyncio.sleep(self.start_s)
        self.told_stale.append(stale)
        self.alive, self.hung, self.version = True, False, 0
        return ReplicaFacts(512, 1000, 0, pid=1)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        for _ in requests:
            self.served.append((str(self.state_of()), self.version))
        await self._enter("generate")
        if self.hung:
            await asyncio.Event().wait()
        await asyncio.sleep(self.latency_s)
        if not self.alive:
            raise EngineDeadError(f"{self.name}: the process died")
        return [
            Completion(r.prompt_token_ids, (0.0,) * len(r.prompt_token_ids), "stop", self.version)
            for r in requests
        ]

    async def probe(self) -> None:
        await self._enter("probe")
        if self.hung:
            await asyncio.Event().wait()

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        await self._enter("begin_refit")
        self._target, self._came = (spec, version), []

    async def load_bucket(self, bucket: Bucket) -> None:
        await self._enter("load_bucket")
        self.version = -1
        self._came += [RefitTensor(p.name, p.shape, getattr(torch, p.dtype)) for p in bucket.tensors]

    async def finish_refit(self) -> RefitAck:
        await self._enter("finish_refit")
        assert self._target is not None
        self.version = self._target[1]
        digest = "wrong" if self.wrong_digest else manifest_digest(RefitSpec(tuple(self._came)))
        return RefitAck(self.name, self.version, digest)

    async def abort_refit(self) -> None:
        await self._enter("abort_refit")

    async def pause(self) -> None:
        await self._enter("pause")

    async def resume(self) -> None:
        await self._enter("resume")

    async def sleep(self) -> None:
        await self._enter("sleep")

    async def wake(self) -> None:
        await self._enter("wake")

    async def health(self) -> dict[str, Any]:
        await self._enter("health")
        return dict(self.facts)

    async def kill(self) -> None:
        self.calls["kill"] = self.calls.get("kill", 0) + 1
        self.alive = False

    async def shutdown(self, timeout_s: float) -> None:
        await self._enter("shutdown", needs_life=False)
        self.alive = False


class ScriptedSource:
    """A double of the policy's side of a refit: three buckets of one tensor each, without bytes."""

    def __init__(self, fails_at: int | None = None, error: Exception | None = None, *, window: int) -> None:
        self.window = window
        self.fails_at = fails_at
        self.error = error or RuntimeError("the stream broke")
        self.log: list[str] = []
        self._next = 0

    def begin(self, transport: str) -> RefitSpec:
        self.log.append(f"begin {transport}")
        self._next = 0
        return SPEC

    def next_bucket(self) -> Bucket | None:
        if self._next == self.fails_at:
            raise self.error
        if self._next == len(SPEC.tensors):
            return None
        tensor = SPEC.tensors[self._next]
        self._next += 1
        self.log.append(f"bucket {self._next}")
        place = TensorPlace(tensor.name, tensor.shape, "float32", 0)
        return Bucket("shared_memory", None, 16, (place,), window=self.window)

    def end(self) -> None:
        self.log.append("end")


SETTINGS = FleetSettings(
    probe_timeout_s=0.2, request_timeout_s=600, replica_wait_s=60, restarts=RestartPolicy(jitter=0.0)
)


class Scripted:
    """A started fleet of scripted replicas on the running loop; ends with the block."""

    def __init__(self, count: int, settings: FleetSettings = SETTINGS) -> None:
        self.replicas = [ScriptedReplica(f"r{i}") for i in range(count)]
        loop = asyncio.get_running_loop()
        self.core = FleetCore(self.replicas, settings, loop.time)
        for replica in self.replicas:
            machine = self.core.members[replica.name].machine
            replica.state_of = lambda machine=machine: machine.state

    @property
    def states(self) -> list[str]:
        return [str(member.state) for member in self.core.members.values()]

    async def __aenter__(self) -> Scripted:
        await self.core.start()
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.core.shutdown(10.0)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, f"states: {self.states}"
            await asyncio.sleep(0.05)


def requests(count: int, first: int = 0) -> list[GenerationRequest]:
    """Prompts of one token, each with another id."""
    return [GenerationRequest((first + i,), SamplingParams(max_new_tokens=4)) for i in range(count)]


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def scripted_replica() -> type[ScriptedReplica]:
    return ScriptedReplica


@pytest.fixture(params=[1, 2])
def source(request: pytest.FixtureRequest) -> Callable[..., ScriptedSource]:
    """Makes sources whose buckets are loaded one by one, or one while the next is there already."""
    return functools.partial(ScriptedSource, window=request.param)


@pytest.fixture
def make_requests() -> Callable[..., list[GenerationRequest]]:
    return requests


@pytest.fixture
def refuse_old_weights() -> Callable[[ScriptedReplica], None]:
    """Let a replica say that its weights are stale, as a real engine does."""

    def refuse(replica: ScriptedReplica) -> None:
        replica.faults.setdefault("generate", []).append(StaleWeightsError(f"{replica.name}: stale"))

    return refuse


@pytest.fixture
def stopwatch() -> Callable[[], float]:
    """Real seconds since the fixture was made."""
    began = time.perf_counter()
    return lambda: time.perf_counter() - began
