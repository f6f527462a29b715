"""A fleet over vLLM's engine core, in this process and without vLLM: what one says, the other understands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_generation.failures import BusyError, RefitError
from rl_generation.fleet.core import FleetCore
from rl_generation.fleet.settings import FleetSettings
from rl_generation.protocol import Completion, GenerationRequest, RefitSpec, SamplingParams
from rl_generation.refit.contract import Bucket
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.vllm import VllmSettings
from rl_generation.vllm.core import EngineCore
from rl_generation.vllm.driver import Driver, Launched
from rl_generation.vllm.sync_driver import SyncDriver

STATE = {"a.weight": torch.zeros(2, 2)}
FACTS = Launched(16, 8, False, 1, ())


class Replica:
    """A core that is made anew at each start."""

    def __init__(self, make: Callable[[], EngineCore]) -> None:
        self.name = "r0"
        self.kills = 0
        self._make = make
        self.core = make()

    async def reserve(self) -> None:
        return None

    async def start(self, *, stale: bool = False) -> Any:
        self.core = self._make()
        return await self.core.start(stale=stale)

    async def kill(self) -> None:
        self.kills += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


class Drained:
    """A driver whose requests have to end before it is held; probes are requests like any."""

    engine: Any = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.flying: set[object] = set()

    async def launch(self) -> Launched:
        return FACTS

    def when_dead(self, callback: Callable[[str], None]) -> None: ...

    async def sample(self, requests: Sequence[GenerationRequest], version: Any) -> list[Completion]:
        request = object()
        self.flying.add(request)
        try:
            # The first token of a start is quick, and so is a probe.
            await asyncio.sleep(self.seconds if len(requests) > 1 else 0.05)
        finally:
            self.flying.discard(request)
        return [Completion((1,), (-1.0,), "length", 0) for _ in requests]

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        return []

    async def hold(self) -> None:
        while self.flying:
            await asyncio.sleep(0.01)

    async def let_go(self) -> None: ...

    async def note_version(self, version: int) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def in_flight(self) -> int:
        return len(self.flying)

    def counters(self) -> dict[str, int]:
        return {}

    async def close(self, timeout_s: float) -> None: ...


class Batches(SyncDriver):
    """vLLM's synchronous engine without vLLM: each step of a batch gives one token of each request."""

    def __init__(self, settings: VllmSettings, steps: int) -> None:
        super().__init__(settings, cpu=True)
        self._steps = steps

    async def launch(self) -> Launched:
        self._facts = FACTS
        self._step = SimpleNamespace(get_output=lambda: SimpleNamespace(outputs=[self._token()] * 4))
        self._count_steps(self._step)
        return FACTS

    async def note_version(self, version: int) -> None: ...

    async def close(self, timeout_s: float) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _generate(self, prompts: list[tuple[int, ...]], arguments: list[dict[str, Any]]) -> list[Any]:
        for _ in range(self._steps if len(prompts) > 1 else 1):
            time.sleep(0.02)
            self._step.get_output()
        flat = SimpleNamespace(token_ids=[1], logprobs=[-1.0])
        answer = SimpleNamespace(finish_reason="length", token_ids=[1], logprobs=flat)
        return [SimpleNamespace(num_cached_tokens=0, outputs=[answer]) for _ in prompts]

    def _token(self) -> Any:
        return SimpleNamespace(new_token_ids=[1])


class Source:
    """Announces what the cores have, and gives nothing."""

    def begin(self, transport: str) -> RefitSpec:
        return spec_of_tensors(STATE.items())

    def next_bucket(self) -> Bucket | None:
        raise AssertionError("nobody began")

    def end(self) -> None: ...


class Bench:
    """Makes a started fleet of one core."""

    def __init__(self, folder: Path) -> None:
        save_file(STATE, folder / "model.safetensors")
        self._folder = str(folder)

    async def start(
        self, driver: Callable[[VllmSettings], Driver], **settings: Any
    ) -> tuple[FleetCore, Replica]:
        of_engine = VllmSettings(self._folder, control_timeout_s=0.2, probe_timeout_s=0.15)
        replica = Replica(lambda: EngineCore(of_engine, driver(of_engine)))
        settings = {"probe_timeout_s": 0.15, "replica_wait_s": 2.0, "infra_budget": 0, **settings}
        core = FleetCore([replica], FleetSettings(**settings), asyncio.get_running_loop().time)
        await core.start()
        return core, replica


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest((1,), SamplingParams(4))] * count


def test_a_synchronous_engine_survives_a_batch_longer_than_its_probes(bench: Bench) -> None:
    """Each probe waits behind the batch and runs into its deadline, and tokens come meanwhile."""

    async def scene() -> None:
        core, replica = await bench.start(lambda settings: Batches(settings, 50), probe_interval_s=0.05)
        assert len(await core.generate(requests(4))) == 4
        assert replica.kills == 0
        assert (await replica.health())["sampled_tokens"] >= 200
        await core.shutdown(1.0)

    asyncio.run(scene())


def test_a_fleet_sleeps_while_it_is_probed_but_not_during_a_request(bench: Bench) -> None:
    async def scene() -> None:
        core, replica = await bench.start(lambda settings: Drained(0.5), probe_interval_s=0.05)
        while not replica.core._driver.in_flight():
            await asyncio.sleep(0.005)
        await core.sleep()
        assert (await core.health())["state"] == (await replica.health())["state"] == "asleep"
        await core.wake()
        over_http = asyncio.ensure_future(replica.generate(requests(2)))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="in flight"):
            await core.sleep()
        assert len(await over_http) == 2
        assert (replica.kills, (await core.health())["state"]) == (0, "running")
        await core.shutdown(1.0)

    asyncio.run(scene())


@pytest.mark.parametrize("stop", ["refit", "pause"])
def test_requests_that_outlast_a_stop_are_answered_and_kill_nobody(bench: Bench, stop: str) -> None:
    async def scene() -> None:
        core, replica = await bench.start(lambda settings: Drained(0.6), probe_interval_s=3600.0)
        call = asyncio.ensure_future(core.generate(requests(2)))
        await asyncio.sleep(0.01)
        with pytest.raises((RefitError, BusyError), match=r"a pause did not end within 0\.2 s"):
            await (core.refit(Source(), 1) if stop == "refit" else core.pause())
        assert len(await call) == 2
        assert (replica.kills, core.version) == (0, 0)
        assert len(await core.generate(requests(1))) == 1
        await core.shutdown(1.0)

    asyncio.run(scene())
