"""Whose weights sampled a token, where vLLM itself does not say: requests may have waited behind a refit."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_generation.failures import GenerationError
from rl_generation.protocol import GenerationRequest, SamplingParams
from rl_generation.refit.contract import Bucket, TensorPlace, manifest_digest
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.vllm import VllmSettings
from rl_generation.vllm.async_driver import AsyncDriver, must_drain
from rl_generation.vllm.core import EngineCore
from rl_generation.vllm.driver import Launched
from rl_generation.vllm.sync_driver import SyncDriver

STATE = {"a.weight": torch.zeros(2, 2)}
SPEC = spec_of_tensors(STATE.items())
BUCKET = Bucket(
    "shared_memory",
    {"place": "p", "inode": 1, "key": "k", "offset": 0},
    16,
    (TensorPlace("a.weight", (2, 2), "float32", 0),),
)
FACTS = Launched(16, 8, False, 1, ())


def output() -> Any:
    """What a vLLM answers that notes no versions."""
    flat = SimpleNamespace(token_ids=[1], logprobs=[-1.0])
    answer = SimpleNamespace(finish_reason="length", token_ids=[1], logprobs=flat)
    return SimpleNamespace(num_cached_tokens=0, outputs=[answer])


class Sync(SyncDriver):
    """Without vLLM; knows with which weights it sampled."""

    weights = 0

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings, cpu=True)
        self.sampled: list[int] = []

    async def launch(self) -> Launched:
        self._facts = FACTS
        return FACTS

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        self.weights += method == "rl_finish_refit"
        return [manifest_digest(SPEC)]

    async def drop_caches(self) -> None: ...

    async def note_version(self, version: int) -> None: ...

    def _generate(self, prompts: list[tuple[int, ...]], arguments: list[dict[str, Any]]) -> list[Any]:
        self.sampled.append(self.weights)
        return [output() for _ in prompts]


class Async(AsyncDriver):
    """Without vLLM; a request ends when the test says so."""

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings, cpu=True)
        self.ends: dict[tuple[int, ...], asyncio.Event] = {(prompt,): asyncio.Event() for prompt in range(3)}
        self._facts = FACTS

    async def _run(self, token_ids: tuple[int, ...], sampling: Any) -> Any:
        await self.ends[token_ids].wait()
        return output()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def request(token: int) -> GenerationRequest:
    return GenerationRequest((token,), SamplingParams(1))


def test_a_batch_that_waited_behind_a_refit_is_of_the_new_version(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    settings = VllmSettings(str(tmp_path))

    async def go() -> None:
        driver = Sync(settings)
        core = EngineCore(settings, driver)
        await core.start()
        driver.sampled.clear()
        await core.begin_refit(SPEC, 1)
        waiting = asyncio.ensure_future(core.generate([request(1)]))
        await asyncio.sleep(0.01)
        await core.load_bucket(BUCKET)
        await core.finish_refit()
        (completion,) = await waiting
        assert list(completion.weight_versions) == driver.sampled == [1]

    run(go())


def test_of_requests_in_one_call_each_is_of_the_version_when_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vars(vllm)["SamplingParams"] = dict
    vars(parameters)["RequestOutputKind"] = SimpleNamespace(FINAL_ONLY=1)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)

    async def go() -> None:
        driver, now = Async(VllmSettings("m")), [3]
        sampling = asyncio.ensure_future(driver.sample([request(i) for i in range(3)], lambda: now[0]))
        for now[0], token in ((3, 2), (4, 0), (5, 1)):
            driver.ends[(token,)].set()
            await asyncio.sleep(0.01)
        assert [completion.weight_version for completion in await sampling] == [4, 5, 3]

    run(go())


def test_requests_go_on_over_a_refit_only_where_vllm_notes_versions() -> None:
    assert must_drain(VllmSettings("m"), notes_versions=False)
    assert not must_drain(VllmSettings("m"), notes_versions=True)
    assert must_drain(VllmSettings("m", in_flight="drain"), notes_versions=True)
    assert not must_drain(VllmSettings("m", in_flight="continue"), notes_versions=True)
    with pytest.raises(GenerationError, match=r"vllm-0: in_flight='continue' needs .* leave in_flight out"):
        must_drain(VllmSettings("m", in_flight="continue"), notes_versions=False)
