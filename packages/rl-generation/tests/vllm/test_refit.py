"""New weights in a running engine: exact for every kind of model, whole or not at all, without old caches."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_generation.failures import EngineDeadError, RefitError, StaleWeightsError
from rl_generation.protocol import Completion, GenerationRequest, RefitSpec, SamplingParams
from rl_generation.refit.buckets import dtype_name
from rl_generation.refit.contract import Bucket, TensorPlace, manifest_digest
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.settings import TransportSettings
from rl_generation.vllm import VllmEngine, VllmSyncEngine
from rl_generation.vllm.processes import wait_until_dead

tools = importlib.import_module("packages.rl-generation.tests.vllm.lab")
reach, requests_of, settings_for = tools.reach, tools.requests_of, tools.settings_for

EXACT = 5e-5
KINDS = pytest.mark.parametrize("kind", tools.KINDS)


@KINDS
def test_every_token_is_exact_before_and_after_each_refit(labs: Callable[[str], Any], kind: str) -> None:
    lab = labs(kind)
    warm, cold = requests_of(48, 16), requests_of(48, 16, temperature=0.6)
    tokens = 0
    for refits in range(3):
        version = lab.refit() if refits else lab.engine.weight_version
        for requests in (warm, cold):
            completions = lab.engine.generate(requests)
            errors = torch.cat(
                [
                    lab.reference.errors(request, completion)
                    for request, completion in zip(requests, completions, strict=True)
                ]
            )
            assert float(errors.max()) < EXACT, (version, float(errors.max()))
            assert {completion.weight_version for completion in completions} == {version}
            tokens += len(errors)
    assert tokens >= 2000


@KINDS
def test_requests_in_flight_keep_their_tokens_and_each_knows_its_version(
    labs: Callable[[str], Any], kind: str
) -> None:
    lab = labs(kind)
    old = lab.engine.weight_version
    requests = requests_of(6, 80, prompt=4)

    async def run() -> list[Completion]:
        before = (await lab.engine.health_async())["sampled_tokens"]
        pending = [asyncio.ensure_future(lab.engine.generate_async(request)) for request in requests]
        await reach(lab.engine, before + 60)
        await asyncio.to_thread(lab.refit)
        return list(await asyncio.gather(*pending))

    completions = asyncio.run(run())
    assert lab.reference.worst(requests, completions) < EXACT
    for completion in completions:
        assert len(completion.token_ids) == 80
        assert completion.weight_version == old + 1
        assert list(completion.weight_versions) == sorted(completion.weight_versions)
    mixed = [completion for completion in completions if set(completion.weight_versions) == {old, old + 1}]
    assert mixed, [completion.weight_versions[0] for completion in completions]
    after = lab.engine.generate(requests)
    assert lab.reference.worst(requests, after) < EXACT


def test_a_refit_to_the_same_numbers_changes_nothing_for_requests_in_flight(
    labs: Callable[[str], Any],
) -> None:
    lab = labs("tied")
    requests = requests_of(4, 80, prompt=4)
    alone = lab.engine.generate(requests)
    version = lab.engine.weight_version + 1

    async def run() -> list[Completion]:
        before = (await lab.engine.health_async())["sampled_tokens"]
        pending = [asyncio.ensure_future(lab.engine.generate_async(request)) for request in requests]
        await reach(lab.engine, before + 40)
        state = lab.reference.moved(version, size=0.0)
        await asyncio.to_thread(lab.engine.update_weights, state.items(), version)
        return list(await asyncio.gather(*pending))

    for completion, other in zip(asyncio.run(run()), alone, strict=True):
        # Not only the weights: a seed's numbers go on where they were, too.
        assert completion.token_ids == other.token_ids
        assert completion.logprobs == pytest.approx(other.logprobs, abs=EXACT)
        assert completion.weight_version == version


def test_g1_no_cached_token_outlives_its_weights(labs: Callable[[str], Any]) -> None:
    lab = labs("tied")
    prompt = tuple((5 * place) % tools.VOCAB for place in range(1, 60))
    request = GenerationRequest(prompt, SamplingParams(4, seed=0))

    def cached() -> int:
        before = lab.engine.health()["cached_prompt_tokens"]
        completions = lab.engine.generate([request])
        assert lab.reference.worst([request], completions) < EXACT
        return lab.engine.health()["cached_prompt_tokens"] - before

    cached()
    assert cached() > 0
    lab.refit()
    assert cached() == 0
    assert cached() > 0


@KINDS
def test_an_announcement_that_does_not_fit_changes_nothing(labs: Callable[[str], Any], kind: str) -> None:
    lab = labs(kind)
    requests = requests_of(4)
    before, version = lab.engine.generate(requests), lab.engine.weight_version
    state = lab.reference.state
    name = "model.layers.1.input_layernorm.weight"
    others = {key: value for key, value in state.items() if key != name}
    wrong = {
        "lacks": others,
        "has not": {**state, "model.layers.9.weight": torch.zeros(2)},
        "shape": {**others, name: torch.zeros(3)},
        "dtype": {**others, name: torch.zeros(64, dtype=torch.int64)},
    }
    for says, weights in wrong.items():
        with pytest.raises(RefitError, match=says):
            lab.engine.prepare_refit(spec_of_tensors(weights.items()))
        with pytest.raises(RefitError, match=says):
            lab.engine.update_weights(weights.items(), version + 1)
        assert_same(lab.engine.generate(requests), before)
    with pytest.raises(RefitError, match="larger"):
        lab.engine.update_weights(state.items(), version)
    assert_same(lab.engine.generate(requests), before)
    assert lab.engine.health()["state"] == "running"


@KINDS
def test_a_refit_that_breaks_off_leaves_nothing_to_sample_from(labs: Callable[[str], Any], kind: str) -> None:
    lab = labs(kind)
    version = lab.engine.weight_version + 1
    state = lab.reference.moved(version)
    spec = spec_of_tensors(state.items())

    def stream() -> Any:
        for number, entry in enumerate(state.items()):
            if number == len(state) // 2:
                raise OSError("the policy's disk is full")
            yield entry

    source = TensorSource(lambda: spec.tensors, stream, TransportSettings(bucket_bytes=1 << 14))

    async def run() -> None:
        await lab.engine.begin_refit(source.begin("shared_memory"), version)
        in_flight = asyncio.ensure_future(lab.engine.generate_async(requests_of(1)[0]))
        with pytest.raises(RefitError, match="disk is full"):
            await load_all(lab, source)
        await lab.engine.abort_refit()
        with pytest.raises(StaleWeightsError):
            await in_flight
        with pytest.raises(StaleWeightsError, match=r"before a refit completes"):
            await lab.engine.generate_async(requests_of(1)[0])
        await lab.engine.probe()

    asyncio.run(run())
    source.end()
    assert lab.engine.health()["state"] == "stale"
    # The same version again, whole.
    lab.engine.update_weights(state.items(), version)
    requests = requests_of(8)
    assert lab.reference.worst(requests, lab.engine.generate(requests)) < EXACT


def test_an_abort_before_any_weight_moved_goes_on_with_the_old_ones(labs: Callable[[str], Any]) -> None:
    lab = labs("moe")
    requests = requests_of(4)
    before, version = lab.engine.generate(requests), lab.engine.weight_version
    spec = spec_of_tensors(lab.reference.state.items())

    async def run() -> None:
        await lab.engine.begin_refit(spec, version + 1)
        pending = asyncio.ensure_future(lab.engine.generate_all_async(requests))
        await asyncio.sleep(0.1)
        assert not pending.done()
        await lab.engine.abort_refit()
        assert_same(await pending, before)

    asyncio.run(run())
    assert lab.engine.weight_version == version


def test_a_shard_that_did_not_get_everything_is_stale(labs: Callable[[str], Any]) -> None:
    lab = labs("untied")
    version = lab.engine.weight_version + 1
    state = lab.reference.moved(version)
    spec = spec_of_tensors(state.items())
    source = TensorSource(lambda: spec.tensors, state.items, TransportSettings(bucket_bytes=1 << 14))

    async def run(drop: int) -> Any:
        await lab.engine.begin_refit(source.begin("shared_memory"), version)
        number = 0
        while (bucket := source.next_bucket()) is not None:
            if number != drop:
                await lab.engine.load_bucket(bucket)
            number += 1
        return await lab.engine.finish_refit()

    with pytest.raises(RefitError, match="never came"):
        asyncio.run(run(1))
    source.end()
    with pytest.raises(StaleWeightsError):
        lab.engine.generate(requests_of(1))
    acknowledgement = asyncio.run(run(-1))
    source.end()
    assert acknowledgement.replica == lab.engine.name
    assert (acknowledgement.version, acknowledgement.digest) == (version, manifest_digest(spec))
    requests = requests_of(4)
    assert lab.reference.worst(requests, lab.engine.generate(requests)) < EXACT


def test_a_bucket_that_is_gone_or_unannounced_is_refused(labs: Callable[[str], Any]) -> None:
    lab = labs("tied")
    version = lab.engine.weight_version + 1
    state = lab.reference.moved(version)
    name, tensor = next(iter(state.items()))
    place = TensorPlace(name, tuple(tensor.shape), dtype_name(tensor.dtype), 0)
    # The largest number that a process can have.
    nowhere = {"place": "/proc/4194304/fd/3", "inode": 1, "key": "0" * 32, "offset": 0}

    async def run() -> None:
        with pytest.raises(RefitError, match="outside a refit"):
            await lab.engine.load_bucket(Bucket("shared_memory", nowhere, 64, (place,)))
        with pytest.raises(RefitError, match="outside a refit"):
            await lab.engine.finish_refit()
        await lab.engine.begin_refit(spec_of_tensors(state.items()), version)
        odd = TensorPlace("odd", (1,), "float32", 0)
        with pytest.raises(RefitError, match="not announced"):
            await lab.engine.load_bucket(Bucket("shared_memory", nowhere, 64, (odd,)))
        with pytest.raises(RefitError, match="is gone"):
            await lab.engine.load_bucket(Bucket("shared_memory", nowhere, 1 << 14, (place,)))
        await lab.engine.abort_refit()

    asyncio.run(run())
    lab.engine.update_weights(state.items(), version)
    requests = requests_of(4)
    assert lab.reference.worst(requests, lab.engine.generate(requests)) < EXACT


def test_a_pause_outlasts_a_refit(labs: Callable[[str], Any]) -> None:
    lab = labs("tied")

    async def run() -> None:
        await lab.engine.pause_async()
        pending = asyncio.ensure_future(lab.engine.generate_async(requests_of(1)[0]))
        await asyncio.to_thread(lab.refit)
        await asyncio.sleep(0.1)
        assert not pending.done()
        await lab.engine.resume_async()
        completion = await pending
        assert lab.reference.worst(requests_of(1), [completion]) < EXACT

    asyncio.run(run())


def test_where_nobody_notes_versions_requests_in_flight_end_before_a_refit(
    labs: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = labs("tied")
    old = lab.engine.weight_version
    requests = requests_of(4, 60)

    async def drains(core: Any) -> None:
        monkeypatch.setattr(core._driver, "_drains", True)

    async def run() -> list[Completion]:
        await lab.engine.on_engine_loop(drains)
        before = (await lab.engine.health_async())["sampled_tokens"]
        pending = [asyncio.ensure_future(lab.engine.generate_async(request)) for request in requests]
        await reach(lab.engine, before + 20)
        await asyncio.to_thread(lab.refit)
        return list(await asyncio.gather(*pending))

    completions = asyncio.run(run())
    assert {version for completion in completions for version in completion.weight_versions} == {old}
    assert lab.reference.worst(requests, completions) < EXACT


def test_g2_the_synchronous_engine_is_as_exact_and_forgets_media_too(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("tied")
    lab = tools.Lab(
        VllmSyncEngine(settings_for(folder, "vllm-sync")), folder, tools.Reference(folder, tmp_path)
    )
    lab.engine.start()
    try:
        requests = [
            *requests_of(4, temperature=0.6),
            *requests_of(4, top_p=0.8),
            *requests_of(1, temperature=0),
        ]
        assert lab.reference.worst(requests, lab.engine.generate(requests)) < EXACT
        runner = asyncio.run(lab.engine.on_engine_loop(_runner))
        runner.encoder_cache["a picture's hash"] = torch.ones(3)
        assert lab.refit() == 1
        assert runner.encoder_cache == {}
        completions = lab.engine.generate(requests)
        assert lab.reference.worst(requests, completions) < EXACT
        assert {completion.weight_version for completion in completions} == {1}
        # One to see that it works.
        assert lab.engine.health()["sampled_tokens"] == 1 + 2 * 12 * len(requests)
        assert lab.engine.score((1, 2, 3))
        with pytest.raises(RefitError, match="lacks"):
            lab.engine.prepare_refit(RefitSpec(()))
    finally:
        lab.engine.shutdown(20.0)


def assert_same(completions: list[Completion], before: list[Completion]) -> None:
    """Up to what the size of a batch does to the order of sums."""
    for completion, old in zip(completions, before, strict=True):
        assert completion.token_ids == old.token_ids
        assert completion.logprobs == pytest.approx(old.logprobs, abs=EXACT)
        assert completion.weight_version == old.weight_version


def test_an_engine_spread_over_two_processes_is_as_exact_and_dies_as_a_whole(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("moe")
    engine = VllmEngine(
        settings_for(folder, "vllm-two", tensor_parallel_size=2, max_num_seqs=8, load_format="dummy")
    )
    lab = tools.Lab(engine, folder, tools.Reference(folder, tmp_path))
    facts = engine.start()
    try:
        requests = requests_of(6, temperature=0.6)
        # Its weights are random numbers of its own, so far.
        assert engine.health()["state"] == "stale"
        with pytest.raises(StaleWeightsError):
            engine.generate(requests)
        engine.update_weights(lab.reference.state.items(), 0)
        assert lab.reference.worst(requests, engine.generate(requests)) < EXACT
        lab.refit()
        assert lab.reference.worst(requests, engine.generate(requests)) < EXACT
        (family,) = (tuple(asyncio.run(engine.on_engine_loop(_processes))),)
        assert len(family) >= 3
        assert facts.pid in family
        # The one that the others are children of.
        os.kill(family[0], signal.SIGKILL)
        assert wait_until_dead(family, 10.0) == []
        with pytest.raises(EngineDeadError):
            engine.generate(requests)
    finally:
        engine.shutdown(20.0)


async def _processes(core: Any) -> tuple[int, ...]:
    return core._facts.processes


async def load_all(lab: Any, source: TensorSource) -> None:
    while (bucket := source.next_bucket()) is not None:
        await lab.engine.load_bucket(bucket)


async def _runner(core: Any) -> Any:
    executor = core.client.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner
