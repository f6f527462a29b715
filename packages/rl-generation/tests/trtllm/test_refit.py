"""New weights, proved by log-probabilities; pauses, sleeps and what happens when they fail."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_generation.failures import (
    DeadlineError,
    EngineDeadError,
    GenerationError,
    RefitError,
    StaleWeightsError,
)
from rl_generation.protocol import (
    Completion,
    Generation,
    GenerationRequest,
    RefitSpec,
    RefitTensor,
    SamplingParams,
)
from rl_generation.refit.contract import RefitAck, manifest_digest
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.settings import TransportSettings
from rl_generation.trtllm import TrtllmEngine, TrtllmGeneration, TrtllmSettings

from .conftest import CONTEXT, TinyModel, logprobs_of

PROMPT = (5, 9, 4, 11, 6, 20)
SMALL = TransportSettings(bucket_bytes=4096)
Tensors = Mapping[str, torch.Tensor]


def request(tokens: int = 12, seed: int = 1) -> GenerationRequest:
    return GenerationRequest(PROMPT, SamplingParams(max_new_tokens=tokens, seed=seed))


def fits(answer: Completion, model: Any) -> bool:
    expected = logprobs_of(model, PROMPT, answer.token_ids)
    return list(answer.logprobs) == pytest.approx(expected, abs=2e-5)


@contextmanager
def published(tensors: Tensors) -> Iterator[tuple[RefitSpec, Iterator[Any]]]:
    """Buckets in shared memory, many of them."""
    entries = spec_of_tensors(tensors.items()).tensors
    source = TensorSource(lambda: entries, lambda: tensors.items(), SMALL)
    try:
        yield source.begin("shared_memory"), iter(source.next_bucket, None)
    finally:
        source.end()


async def refit(engine: TrtllmEngine, tensors: Tensors, version: int) -> RefitAck:
    with published(tensors) as (spec, buckets):
        await engine.begin_refit(spec, version)
        count = 0
        for bucket in buckets:
            await engine.load_bucket(bucket)
            count += 1
        assert count > 3
        return await engine.finish_refit()


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_g1_after_a_refit_nothing_is_left_of_the_old_weights(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], model: str
) -> None:
    old, new = models[model].load(), models[f"{model}-next"]

    async def scenario(engine: TrtllmEngine) -> Any:
        before = [await engine.generate_async(request(seed=i)) for i in range(2)]
        ack = await refit(engine, new.tensors(), 4)
        after = [await engine.generate_async(request(seed=i)) for i in range(2)]
        return before, after, ack, [handle.cached_tokens for handle in engine._llm.handles]

    before, after, ack, cached = on_engine(scenario, model)
    assert all(fits(answer, old) for answer in before)
    assert all(fits(answer, new.load()) for answer in after)
    assert not any(fits(answer, old) for answer in after)
    assert [answer.weight_version for answer in (*before, *after)] == [0, 0, 4, 4]
    assert cached == [0, len(PROMPT) - 1, 0, len(PROMPT) - 1]
    assert ack == RefitAck("trtllm-0", 4, manifest_digest(spec_of_tensors(new.tensors().items())))


def test_a_tied_model_may_be_sent_with_its_head(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    new = models["tied-next"]
    tensors = {**new.tensors(), "lm_head.weight": new.tensors()["model.embed_tokens.weight"]}

    async def scenario(engine: TrtllmEngine) -> Completion:
        await refit(engine, tensors, 1)
        return await engine.generate_async(request())

    assert fits(on_engine(scenario, "tied"), new.load())


def test_every_worker_gets_the_weights(on_engine: Callable[..., Any], models: dict[str, TinyModel]) -> None:
    new = models["untied-next"].tensors()

    async def scenario(engine: TrtllmEngine) -> list[bool]:
        await refit(engine, new, 1)
        return [
            all(torch.equal(worker.model.state_dict()[name], tensor) for name, tensor in new.items())
            for worker in engine._llm.workers
        ]

    assert on_engine(scenario, tensor_parallel=2) == [True, True]


def _without_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def _with_stranger(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.layers.9.input_layernorm.weight": torch.zeros(32)}


def _misshapen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.norm.weight": torch.zeros(31)}


def _integers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.norm.weight": torch.zeros(32, dtype=torch.int32)}


@pytest.mark.parametrize("change", [_without_head, _with_stranger, _misshapen, _integers])
def test_an_announcement_that_does_not_fit_moves_nothing(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], change: Callable[..., Any]
) -> None:
    spec = spec_of_tensors(change(models["untied-next"].tensors()).items())

    async def scenario(engine: TrtllmEngine) -> Any:
        with pytest.raises(RefitError):
            engine.check_refit(spec)
        with pytest.raises(RefitError):
            await engine.begin_refit(spec, 1)
        assert (await engine.health())["state"] == "running"
        return await engine.generate_async(request())

    answer = on_engine(scenario)
    assert answer.weight_version == 0
    assert fits(answer, models["untied"].load())


def test_a_policy_in_another_floating_dtype_is_taken(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    new = {name: tensor.bfloat16() for name, tensor in models["untied-next"].tensors().items()}
    reference = copy.deepcopy(models["untied-next"].load())
    reference.load_state_dict(new)

    async def scenario(engine: TrtllmEngine) -> Completion:
        await refit(engine, new, 1)
        return await engine.generate_async(request())

    assert fits(on_engine(scenario), reference)


def test_a_version_must_grow(on_engine: Callable[..., Any], models: dict[str, TinyModel]) -> None:
    async def scenario(engine: TrtllmEngine) -> None:
        await refit(engine, models["untied-next"].tensors(), 3)
        for version in (2, 3):
            with pytest.raises(RefitError, match="larger"):
                await refit(engine, models["untied-next"].tensors(), version)
        assert engine.weight_version == 3

    on_engine(scenario)


def test_a_refit_that_ends_too_early_leaves_the_engine_stale_until_another_completes(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    new = models["untied-next"]

    async def scenario(engine: TrtllmEngine) -> Completion:
        with published(new.tensors()) as (spec, buckets):
            await engine.begin_refit(spec, 1)
            await engine.load_bucket(next(buckets))
            with pytest.raises(RefitError, match="never came"):
                await engine.finish_refit()
        assert (await engine.health())["state"] == "stale"
        with pytest.raises(StaleWeightsError):
            await engine.generate_async(request())
        await engine.probe()
        await refit(engine, new.tensors(), 1)
        return await engine.generate_async(request())

    assert fits(on_engine(scenario), new.load())


@pytest.mark.parametrize("quirk", ["load_failure", "finalise_failure"])
def test_a_worker_that_cannot_take_weights_leaves_the_engine_stale(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], quirks: Any, quirk: str
) -> None:
    async def scenario(engine: TrtllmEngine) -> None:
        setattr(quirks, quirk, RuntimeError("no room"))
        with pytest.raises(RefitError, match="no room") as caught:
            await refit(engine, models["untied-next"].tensors(), 1)
        assert isinstance(caught.value.__cause__, RuntimeError)
        setattr(quirks, quirk, None)
        await engine.abort_refit()
        await engine.abort_refit()
        with pytest.raises(StaleWeightsError):
            await engine.generate_async(request())
        await refit(engine, models["untied-next"].tensors(), 1)
        await engine.generate_async(request())

    on_engine(scenario)


def test_a_dead_worker_in_a_refit_is_a_dead_engine(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], quirks: Any
) -> None:
    died = pytest.importorskip("ray.exceptions").ActorDiedError()

    async def scenario(engine: TrtllmEngine) -> None:
        quirks.load_failure = died
        with pytest.raises(EngineDeadError):
            await refit(engine, models["untied-next"].tensors(), 1)

    on_engine(scenario)


def test_a_refit_that_moved_nothing_may_be_given_up(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    async def scenario(engine: TrtllmEngine) -> Any:
        with published(models["untied-next"].tensors()) as (spec, buckets):
            await engine.begin_refit(spec, 1)
            bucket = dataclasses.replace(next(buckets), transport="collective")
            with pytest.raises(RefitError, match="collective"):
                await engine.load_bucket(bucket)
            await engine.abort_refit()
        return await engine.generate_async(request())

    assert fits(on_engine(scenario), models["untied"].load())


@pytest.mark.parametrize("how", [{"stale": True}, {"load_format": "dummy"}])
def test_an_engine_that_starts_stale_serves_nothing_before_its_refit(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], how: dict[str, Any]
) -> None:
    new = models["untied-next"]

    async def scenario(engine: TrtllmEngine) -> Any:
        assert (await engine.health())["state"] == "stale"
        with pytest.raises(StaleWeightsError):
            await engine.generate_async(request())
        assert engine._llm.submitted == []
        await refit(engine, new.tensors(), 7)
        return await engine.generate_async(request())

    answer = on_engine(scenario, **how)
    assert answer.weight_version == 7
    assert fits(answer, new.load())


class Gate:
    """Holds requests of the double when they have so many tokens."""

    def __init__(self, quirks: Any, tokens: int) -> None:
        self.reached = asyncio.Event()
        self._tokens = tokens
        quirks.on_step = self.step

    async def step(self, handle: Any) -> None:
        if len(handle.outputs[0].token_ids) >= self._tokens and not handle.is_aborted:
            self.reached.set()
            while not handle.is_aborted:
                await asyncio.sleep(0.001)

    def open(self) -> None:
        self._tokens = 10_000


def test_requests_in_flight_keep_their_tokens_and_know_who_sampled_them(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], quirks: Any
) -> None:
    old, new = models["untied"].load(), models["untied-next"]

    async def scenario(engine: TrtllmEngine) -> list[Completion]:
        gate = Gate(quirks, 5)
        running = asyncio.ensure_future(engine.generate([request(seed=i) for i in range(3)]))
        await gate.reached.wait()
        await asyncio.sleep(0.05)
        gate.open()
        await refit(engine, new.tensors(), 2)
        return await running

    for answer in on_engine(scenario):
        assert answer.weight_versions == (0,) * 5 + (2,) * 7
        assert (answer.weight_version, answer.stop_reason) == (2, "length")
        expected = [
            *logprobs_of(old, PROMPT, answer.token_ids)[:5],
            *logprobs_of(new.load(), PROMPT, answer.token_ids)[5:],
        ]
        assert list(answer.logprobs) == pytest.approx(expected, abs=2e-5)


def test_a_pause_changes_no_token_of_its_version(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], quirks: Any
) -> None:
    async def scenario(engine: TrtllmEngine) -> Any:
        gate = Gate(quirks, 3)
        running = asyncio.ensure_future(engine.generate_async(request()))
        await gate.reached.wait()
        await engine.pause()
        late = asyncio.ensure_future(engine.generate_async(request()))
        gate.open()
        await asyncio.sleep(0.02)
        assert not running.done()
        assert not late.done()
        assert len(engine._llm.handles) == 1
        await engine.probe()
        await engine.resume()
        return await running, await late

    for answer in on_engine(scenario):
        assert len(answer.token_ids) == 12
        assert answer.weight_versions == (0,) * 12
        assert fits(answer, models["untied"].load())


def test_a_pause_within_a_refit_does_not_open_the_gate(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    async def scenario(engine: TrtllmEngine) -> None:
        with published(models["untied-next"].tensors()) as (spec, buckets):
            await engine.begin_refit(spec, 1)
            await engine.pause()
            await engine.resume()
            waiting = asyncio.ensure_future(engine.generate_async(request()))
            for bucket in buckets:
                await engine.load_bucket(bucket)
            assert not waiting.done()
            await engine.finish_refit()
            assert (await waiting).weight_version == 1

    on_engine(scenario)


def test_a_pause_that_never_ends_is_an_error(on_engine: Callable[..., Any]) -> None:
    async def scenario(engine: TrtllmEngine) -> None:
        await engine.pause()
        with pytest.raises(DeadlineError, match="a pause"):
            await engine.generate_async(request())

    on_engine(scenario, pause_timeout_s=0.05)


def test_requests_that_do_not_stop_are_an_error_and_go_on(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], quirks: Any
) -> None:
    async def scenario(engine: TrtllmEngine) -> Any:
        hang = asyncio.Event()
        started = asyncio.Event()

        async def step(handle: Any) -> None:
            started.set()
            await hang.wait()

        quirks.on_step = step
        running = asyncio.ensure_future(engine.generate_async(request()))
        await started.wait()
        with pytest.raises(DeadlineError, match="did not stop"):
            await refit(engine, models["untied-next"].tensors(), 1)
        assert (await engine.health())["state"] == "running"
        hang.set()
        return await running

    answer = on_engine(scenario, pause_timeout_s=0.1)
    assert fits(answer, models["untied"].load())


def test_a_shutdown_gives_back_what_was_sampled(on_engine: Callable[..., Any], quirks: Any) -> None:
    async def scenario(engine: TrtllmEngine) -> Completion:
        gate = Gate(quirks, 4)
        running = asyncio.ensure_future(engine.generate_async(request()))
        await gate.reached.wait()
        await engine.shutdown(2.0)
        return await running

    answer = on_engine(scenario)
    assert (len(answer.token_ids), answer.stop_reason) == (4, "aborted")


def test_after_a_sleep_no_lost_prefix_is_used(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    async def scenario(engine: TrtllmEngine) -> Any:
        await engine.generate_async(request())
        await engine.sleep()
        await engine.sleep()
        released = {str(tag) for tag in engine._llm.workers[0].released}
        late = asyncio.ensure_future(engine.generate_async(request()))
        with pytest.raises(RefitError, match="asleep"):
            await refit(engine, models["untied-next"].tensors(), 1)
        state = (await engine.health())["state"]
        await engine.wake()
        await engine.wake()
        return await late, released, state

    answer, released, state = on_engine(scenario, can_sleep=True)
    assert {"model", "kv_cache", "sampler"} <= released
    assert not any(tag.startswith("_") for tag in released)
    assert state == "asleep"
    assert fits(answer, models["untied"].load())


def test_an_engine_that_was_not_built_to_sleep_says_so(on_engine: Callable[..., Any]) -> None:
    with pytest.raises(GenerationError, match="can_sleep"):
        on_engine(lambda engine: engine.sleep())


def test_the_same_for_callers_without_a_loop(double: Any, models: dict[str, TinyModel]) -> None:
    new = models["untied-next"]
    settings = TrtllmSettings(str(models["untied"].folder), max_context=CONTEXT, can_sleep=True)
    engine = TrtllmGeneration(
        settings, transport="shared_memory", transport_settings=SMALL, check=lambda: None
    )
    try:
        assert isinstance(engine, Generation)
        assert engine.base_urls == []
        with pytest.raises(GenerationError, match="prepare_refit"):
            engine.update_weights(new.tensors().items(), 1)
        with pytest.raises(RefitError):
            engine.prepare_refit(RefitSpec((RefitTensor("x", (1,), torch.float32),)))
        engine.prepare_refit(spec_of_tensors(new.tensors().items()))
        with pytest.raises(RefitError):
            engine.update_weights(list(new.tensors().items())[:3], 1)
        engine.update_weights(new.tensors().items(), 2)
        engine.pause()
        engine.resume()
        engine.sleep()
        engine.wake()
        (answer,) = engine.generate([request()])
        assert fits(answer, new.load())
        assert asyncio.run(engine.generate_async(request())).token_ids == answer.token_ids
        assert (engine.weight_version, engine.health()["state"]) == (2, "running")
    finally:
        engine.shutdown(2.0)
        engine.shutdown(2.0)
    assert engine.health()["state"] == "closed"


def test_a_folder_without_safetensors_cannot_be_refitted(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of_tensors(models["untied"].tensors().items())

    async def scenario(engine: TrtllmEngine) -> None:
        monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
        with pytest.raises(RefitError, match="safetensors"):
            await engine.begin_refit(spec, 1)
        monkeypatch.undo()

    on_engine(scenario)
