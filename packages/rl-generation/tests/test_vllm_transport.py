"""How buckets reach an engine's own processes: by the policy's folder, or out of Ray's store by a copy."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_generation.failures import EngineDeadError, RefitError
from rl_generation.protocol import RefitTensor
from rl_generation.refit.buckets import dtype_name
from rl_generation.refit.contract import Bucket, TensorPlace
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.receive import BucketReader
from rl_generation.refit.settings import TransportSettings
from rl_generation.refit.transports import object_store
from rl_generation.refit.wire import bucket_from_json, bucket_to_json, spec_to_json
from rl_generation.vllm import VllmEngine, VllmSettings, refit_worker
from rl_generation.vllm.arguments import engine_arguments
from rl_generation.vllm.core import EngineCore
from rl_generation.vllm.relay import RelayedBucket

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([7], dtype=torch.bfloat16)}
SPEC = spec_of_tensors(STATE.items())
PLACES = tuple(
    TensorPlace(name, tuple(tensor.shape), dtype_name(tensor.dtype), 64 * number)
    for number, (name, tensor) in enumerate(STATE.items())
)
STORED = Bucket("object_store", "reference", 66, PLACES)


def stored_bytes() -> Any:
    held = torch.zeros(66, dtype=torch.uint8)
    for place in PLACES:
        raw = STATE[place.name].reshape(-1).view(torch.uint8)
        held[place.offset : place.offset + raw.numel()] = raw
    return held.numpy()


class Store:
    """Ray's store: gives the bytes once it is let, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.given = threading.Event()
        self.lost = False
        monkeypatch.setattr(object_store, "_require_ray", lambda: self)

    def get(self, reference: str, timeout: float) -> Any:
        if not self.given.wait(10) or self.lost:
            raise RuntimeError("lost")
        return stored_bytes()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store(monkeypatch)
    yield store
    store.given.set()


class Driver:
    """Only takes buckets, and copies what is in them."""

    engine: Any = None

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self._reader = BucketReader(TransportSettings())

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        if method == "rl_load_bucket":
            near = bucket_from_json(arguments[0])
            self.received |= {name: tensor.clone() for name, tensor in self._reader.tensors(near)}
            self._reader.close()
        return [None]

    async def hold(self) -> None: ...


async def arriving(folder: Path, **settings: Any) -> tuple[EngineCore, Driver]:
    """A core in a refit."""
    save_file(STATE, folder / "model.safetensors")
    driver: Any = Driver()
    core = EngineCore(VllmSettings(str(folder), **settings), driver)
    core._facts = SimpleNamespace(tied=False)  # type: ignore[assignment]
    await core.begin_refit(SPEC, 1)
    return core, driver


async def settled(open_segments: Callable[[], int]) -> None:
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("vllm-0:") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    gc.collect()
    assert open_segments() == 0


def test_a_bucket_out_of_rays_store_is_put_where_the_engine_can_read_it(
    tmp_path: Path, store: Store, open_segments: Callable[[], int]
) -> None:
    async def go() -> None:
        core, driver = await arriving(tmp_path)
        store.given.set()
        await core.load_bucket(STORED)
        assert {name for name, tensor in STATE.items() if torch.equal(driver.received[name], tensor)} == {
            "a",
            "b",
        }
        await settled(open_segments)

    asyncio.run(go())


def test_the_loop_goes_on_while_a_bucket_is_waited_for(
    tmp_path: Path, store: Store, open_segments: Callable[[], int]
) -> None:
    async def go() -> None:
        core, _ = await arriving(tmp_path, refit_timeout_s=0.2)
        loading = asyncio.ensure_future(core.load_bucket(STORED))
        begun, longest = time.monotonic(), 0.0
        while not loading.done():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - before)
        with pytest.raises(RefitError, match=r"vllm-0: taking a bucket out of Ray's store .* within 0\.2 s"):
            await loading
        assert time.monotonic() - begun < 5
        assert longest < 2
        # What comes after all is given back by the thread that waited for it.
        store.given.set()
        await settled(open_segments)

    asyncio.run(go())


def test_a_death_ends_the_wait_for_a_bucket_and_a_loss_is_said(
    tmp_path: Path, store: Store, open_segments: Callable[[], int]
) -> None:
    async def go() -> None:
        core, _ = await arriving(tmp_path)
        loading = asyncio.ensure_future(core.load_bucket(STORED))
        await asyncio.sleep(0.02)
        core._died("the engine's process 1 has ended unexpectedly")
        with pytest.raises(EngineDeadError, match="process 1"):
            await loading
        store.lost = True
        store.given.set()
        await settled(open_segments)
        core, _ = await arriving(tmp_path)
        with pytest.raises(RefitError, match="did not come out of Ray's store"):
            await core.load_bucket(STORED)
        await settled(open_segments)

    asyncio.run(go())


def test_a_copy_can_be_given_back_before_it_is_made(store: Store, open_segments: Callable[[], int]) -> None:
    store.given.set()
    copy = RelayedBucket(STORED, TransportSettings())
    copy.close()
    copy.make()
    assert open_segments() == 0


class Base:
    """Of vLLM's worker, what the mixin needs."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config, self.rank = vllm_config, 0


class Loading:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}

    def begin(self) -> None: ...

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.received |= {name: tensor.clone() for name, tensor in tensors}


def test_workers_open_buckets_the_way_the_policy_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit_worker, "die_with_parent", print)
    worker_class: Any = type("Worker", (refit_worker.TakesWeights, Base), {})
    settings = VllmSettings("m", transport=TransportSettings(kept_bytes=3, timeout_s=3))
    config = SimpleNamespace(additional_config=engine_arguments(settings, cpu=True)["additional_config"])
    worker = worker_class(config)
    worker._rl_loading = loading = Loading()
    described = [RefitTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in STATE.items()]
    source = TensorSource(lambda: described, STATE.items, settings.transport)
    try:
        worker.rl_begin_refit(spec_to_json(source.begin("shared_memory")), 1)
        while (bucket := source.next_bucket()) is not None:
            worker.rl_load_bucket(bucket_to_json(bucket))
    finally:
        source.end()
    assert {name for name, tensor in STATE.items() if torch.equal(loading.received[name], tensor)} == {
        "a",
        "b",
    }
    assert worker._rl_reader._settings == settings.transport


def test_an_engine_gives_weights_of_its_own_process_by_its_settings() -> None:
    class Engine(VllmEngine):
        buckets: list[Bucket]

        async def begin_refit(self, spec: Any, version: int) -> None:
            self.buckets = []

        async def load_bucket(self, bucket: Bucket) -> None:
            self.buckets.append(bucket)

        async def finish_refit(self) -> Any: ...

        def _block(self, work: Any, timeout_s: float) -> Any:
            return asyncio.run(work())

    engine = Engine(VllmSettings("m", transport=TransportSettings(bucket_bytes=1)))
    engine.update_weights(STATE.items(), 1)
    assert [[place.name for place in bucket.tensors] for bucket in engine.buckets] == [["a"], ["b"]]
    assert {bucket.transport for bucket in engine.buckets} == {"shared_memory"}
