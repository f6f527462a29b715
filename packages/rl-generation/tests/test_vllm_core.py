"""An engine's states over a driver that notes what it is told: the order of steps, what is served when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rl_generation.failures import (
    BusyError,
    DeadlineError,
    EngineDeadError,
    GenerationError,
    NotReadyError,
    RefitError,
    StaleWeightsError,
)
from rl_generation.protocol import Completion, GenerationRequest, SamplingParams
from rl_generation.refit.buckets import dtype_name
from rl_generation.refit.contract import Bucket, TensorPlace, manifest_digest
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.vllm import VllmSettings
from rl_generation.vllm.core import EngineCore
from rl_generation.vllm.driver import Launched, Version
from rl_generation.vllm.prompt_scores import PromptScores

STATE = {"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(3)}
SPEC = spec_of_tensors(STATE.items())
PLACES = tuple(
    TensorPlace(name, tuple(tensor.shape), dtype_name(tensor.dtype), 64 * number)
    for number, (name, tensor) in enumerate(STATE.items())
)
BUCKETS = [Bucket("shared_memory", {"path": "p", "offset": 0}, 128, (place,)) for place in PLACES]
REQUEST = GenerationRequest((1, 2), SamplingParams(4))
ROUND = ["hold", "rl_begin_refit", "rl_load_bucket", "rl_load_bucket", "rl_finish_refit", "drop", "note 1"]


class Driver:
    """Notes every call; ``hang`` and ``fail`` say at which to do so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hang: set[str] = set()
        self.fail: dict[str, Exception] = {}
        self.digest = manifest_digest(SPEC)
        self.die: Callable[[str], None] = lambda words: None
        self.flying = 0
        self.engine: Any = None
        self.closed = False

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hang:
            await asyncio.sleep(3600)
        if name in self.fail:
            raise self.fail[name]

    async def launch(self) -> Launched:
        await self._do("launch")
        return Launched(16, 8, False, 1, (1,))

    def when_dead(self, callback: Callable[[str], None]) -> None:
        self.die = callback

    async def sample(self, requests: Sequence[GenerationRequest], version: Version) -> list[Completion]:
        await self._do("sample")
        return [Completion((1,), (-1.0,), "length", version()) for _ in requests]

    async def score(self, token_ids: tuple[int, ...], top: int = 0) -> PromptScores:
        await self._do("score")
        count = len(token_ids) - 1
        return PromptScores((-1.0,) * count, np.zeros((count, top), int), np.zeros((count, top)))

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        await self._do(method)
        return [self.digest, self.digest]

    async def hold(self) -> None:
        await self._do("hold")

    async def let_go(self) -> None:
        await self._do("let go")

    async def drop_caches(self) -> None:
        await self._do("drop")

    async def note_version(self, version: int) -> None:
        await self._do(f"note {version}")

    async def abort_all(self) -> None:
        await self._do("abort all")

    async def sleep(self) -> None:
        await self._do("sleep")

    async def wake(self) -> None:
        await self._do("wake")

    def counters(self) -> dict[str, int]:
        return {"sampled_tokens": 0}

    def in_flight(self) -> int:
        return self.flying

    async def close(self, timeout_s: float) -> None:
        self.closed = True


class Bench:
    """A core, its driver, and what a server would have been told."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        save_file(STATE, folder / "model.safetensors")
        self.settings = VllmSettings(str(folder), **settings)
        self.driver = Driver()
        self.core = EngineCore(self.settings, self.driver)
        self.told: list[str] = []
        self.core.listen(
            lambda reason: self.told.append("serve" if reason is None else type(reason).__name__)
        )

    async def start(self, **how: Any) -> None:
        await self.core.start(**how)
        self.driver.calls.clear()
        self.told.clear()

    async def refit(self, version: int, buckets: Sequence[Bucket] = BUCKETS) -> Any:
        await self.core.begin_refit(SPEC, version)
        for bucket in buckets:
            await self.core.load_bucket(bucket)
        return await self.core.finish_refit()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, control_timeout_s=0.2, refit_timeout_s=0.2, probe_timeout_s=0.2)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_a_refit_holds_loads_forgets_notes_and_only_then_samples(bench: Bench) -> None:
    async def go() -> None:
        with pytest.raises(NotReadyError):
            await bench.core.generate([REQUEST])
        assert isinstance(bench.core.refusal(), NotReadyError)
        await bench.start()
        acknowledgement = await bench.refit(1)
        assert bench.driver.calls == [*ROUND, "let go"]
        assert (acknowledgement.version, acknowledgement.digest) == (1, manifest_digest(SPEC))
        (completion,) = await bench.core.generate([REQUEST])
        assert completion.weight_version == bench.core.weight_version == 1
        assert bench.core.refusal() is None

    run(go())


def test_g3_a_restarted_engine_serves_nothing_before_its_refit(bench: Bench) -> None:
    async def go() -> None:
        await bench.core.start(stale=True)
        assert bench.told == ["StaleWeightsError"]
        for call in (bench.core.generate([REQUEST]), bench.core.score((1, 2))):
            with pytest.raises(StaleWeightsError, match="old"):
                await call
        await bench.core.probe()
        assert "sample" in bench.driver.calls
        # Whatever version the others are at.
        await bench.refit(7)
        assert bench.told[-1] == "serve"
        assert (await bench.core.generate([REQUEST]))[0].weight_version == 7

    run(go())


@pytest.mark.parametrize("step", ["rl_load_bucket", "rl_finish_refit", "drop", "note 1"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_refit_that_breaks_in_any_step_leaves_the_engine_stale(bench: Bench, step: str, how: str) -> None:
    async def go() -> None:
        await bench.start()
        if how == "fails":
            bench.driver.fail[step] = RuntimeError("no memory")
        else:
            bench.driver.hang.add(step)
        with pytest.raises(GenerationError, match="no memory" if how == "fails" else "within"):
            await bench.refit(1)
        await bench.core.abort_refit()
        assert bench.told[-1] == "StaleWeightsError"
        assert {"rl_abort_refit", "abort all", "let go"} <= set(bench.driver.calls)
        with pytest.raises(StaleWeightsError):
            await bench.core.generate([REQUEST])
        bench.driver.fail.clear()
        bench.driver.hang.clear()
        await bench.refit(1)
        assert bench.core.refusal() is None

    run(go())


def test_a_refit_that_cannot_begin_goes_on_with_the_old_weights(bench: Bench) -> None:
    async def go() -> None:
        await bench.start()
        with pytest.raises(RefitError, match="lacks"):
            await bench.core.begin_refit(spec_of_tensors([("a.weight", STATE["a.weight"])]), 1)
        assert bench.driver.calls == []
        bench.driver.fail["rl_begin_refit"] = RuntimeError("quantised")
        with pytest.raises(RefitError, match="quantised"):
            await bench.core.begin_refit(SPEC, 1)
        assert bench.driver.calls[-1] == "let go"
        assert (await bench.core.generate([REQUEST]))[0].weight_version == 0
        assert bench.told == []

    run(go())


@pytest.mark.parametrize(("call", "failure"), [("begin_refit", RefitError), ("pause", BusyError)])
def test_requests_that_outlast_a_stop_are_no_silence_and_the_engine_goes_on(
    bench: Bench, call: str, failure: type[Exception]
) -> None:
    """Where requests in flight end first, the engine is well: whoever waits for silence would end it."""

    async def go() -> None:
        await bench.start()
        bench.driver.hang.add("hold")
        arguments = (SPEC, 1) if call == "begin_refit" else ()
        with pytest.raises(failure, match=r"within 0\.2 s.*bound their tokens") as caught:
            await getattr(bench.core, call)(*arguments)
        assert isinstance(caught.value.__cause__, DeadlineError)
        assert bench.driver.calls[-1] == "let go"
        assert (await bench.core.generate([REQUEST]))[0].weight_version == 0
        assert (await bench.core.health())["state"] == "running"
        bench.driver.hang.clear()
        assert (await bench.refit(1)).version == 1

    run(go())


def test_workers_that_hold_something_else_are_found_out(bench: Bench) -> None:
    async def go() -> None:
        await bench.start()
        bench.driver.digest = "other"
        with pytest.raises(RefitError, match=r"workers \[0, 1\] of 2"):
            await bench.refit(1)
        with pytest.raises(StaleWeightsError):
            await bench.core.generate([REQUEST])

    run(go())


def test_a_pause_and_a_refit_do_not_undo_each_other(bench: Bench) -> None:
    async def go() -> None:
        await bench.start()
        await bench.core.pause()
        await bench.refit(1)
        assert "let go" not in bench.driver.calls
        await bench.core.probe()
        assert bench.driver.calls[-1] == "rl_pid"
        await bench.core.begin_refit(SPEC, 2)
        await bench.core.resume()
        assert "let go" not in bench.driver.calls
        await bench.core.abort_refit()
        assert bench.driver.calls[-1] == "let go"
        assert bench.told == ["serve"]

    run(go())


def test_an_asleep_engine_serves_neither_requests_nor_refits(bench: Bench) -> None:
    async def go() -> None:
        await bench.start()
        bench.driver.flying = 1
        with pytest.raises(BusyError, match="in flight"):
            await bench.core.sleep()
        bench.driver.flying = 0
        await bench.core.sleep()
        assert bench.told == ["NotReadyError"]
        with pytest.raises(GenerationError, match="asleep"):
            await bench.core.generate([REQUEST])
        with pytest.raises(RefitError, match="asleep"):
            await bench.core.begin_refit(SPEC, 1)
        await bench.core.wake()
        await bench.core.generate([REQUEST])
        assert bench.told == ["NotReadyError", "serve"]

    run(go())


def test_a_death_fails_what_waits_and_what_comes(bench: Bench) -> None:
    async def go() -> None:
        await bench.start()
        bench.driver.hang |= {"sample", "rl_load_bucket"}
        sampling = asyncio.ensure_future(bench.core.generate([REQUEST]))
        await bench.core.begin_refit(SPEC, 1)
        loading = asyncio.ensure_future(bench.core.load_bucket(BUCKETS[0]))
        await asyncio.sleep(0.01)
        bench.driver.die("the engine's process 1 has ended unexpectedly")
        for task in (sampling, loading):
            with pytest.raises(EngineDeadError, match="process 1"):
                await task
        for call in (bench.core.finish_refit(), bench.core.pause(), bench.core.probe(), bench.core.sleep()):
            with pytest.raises(EngineDeadError):
                await call
        assert bench.told == ["EngineDeadError"]
        assert (await bench.core.health())["state"] == "dead"
        await bench.core.shutdown(1.0)
        assert bench.driver.closed

    run(go())


def test_every_wait_has_a_deadline(bench: Bench) -> None:
    async def go() -> None:
        await bench.start()
        bench.driver.hang |= {"hold", "sample", "sleep"}
        for call in (bench.core.probe(), bench.core.sleep()):
            with pytest.raises(DeadlineError, match=r"vllm-0: .* within 0\.2 s"):
                await call
        for call in (bench.core.pause(), bench.core.begin_refit(SPEC, 1)):
            with pytest.raises((BusyError, RefitError), match=r"vllm-0: a pause .* within 0\.2 s"):
                await call

    run(go())


def test_a_start_that_fails_says_why_and_ends_what_was_started(bench: Bench) -> None:
    async def go() -> None:
        bench.driver.fail["launch"] = ValueError("max_model_len exceeds the cache")
        with pytest.raises(GenerationError, match=r"exceeds the cache.*log"):
            await bench.core.start()
        assert bench.driver.closed

    run(go())
