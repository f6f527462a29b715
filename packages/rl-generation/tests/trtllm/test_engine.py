"""Requests through the engine, against transformers on the same weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_generation.failures import (
    ContextOverflowError,
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    NotReadyError,
    RequestError,
)
from rl_generation.protocol import Completion, GenerationRequest, SamplingParams
from rl_generation.trtllm import TrtllmEngine, TrtllmSettings

from .conftest import CONTEXT, VOCAB, TinyModel, logprobs_of

PROMPT = (5, 9, 4, 11)
NEWER = pytest.mark.parametrize("release", ["1.3.0"], scope="module")
OLDER = pytest.mark.parametrize("release", ["1.2.1"], scope="module")


def request(prompt: tuple[int, ...] = PROMPT, tokens: int = 12, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(max_new_tokens=tokens, **sampling))


async def one(engine: TrtllmEngine, **settings: Any) -> Completion:
    return await engine.generate_async(request(**settings))


def close(left: Any, right: Any) -> bool:
    return list(left) == pytest.approx(list(right), abs=2e-5)


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_log_probabilities_are_those_of_transformers(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], model: str
) -> None:
    reference = models[model].load()

    async def scenario(engine: TrtllmEngine) -> list[Completion]:
        requests = [request((5 + i, 9, 4), 10, seed=i) for i in range(6)]
        return await engine.generate(requests)

    for i, answer in enumerate(on_engine(scenario, model)):
        assert answer.stop_reason == "length"
        assert close(answer.logprobs, logprobs_of(reference, (5 + i, 9, 4), answer.token_ids))
        assert answer.weight_version == 0
        assert answer.weight_versions == (0,) * 10


@NEWER
def test_d5_log_probabilities_are_tempered_like_the_samples(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], release: str
) -> None:
    reference = models["untied"].load()
    answer = on_engine(lambda engine: one(engine, temperature=0.6, seed=3))
    assert close(answer.logprobs, logprobs_of(reference, PROMPT, answer.token_ids, 0.6))
    assert not close(answer.logprobs, logprobs_of(reference, PROMPT, answer.token_ids))


@NEWER
@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.8, "temperature": 0.7}]
)
def test_log_probabilities_are_those_of_the_filtered_distribution(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], release: str, filters: dict[str, Any]
) -> None:
    import torch

    from rl_generation.sampling import sampling_logprobs

    answer = on_engine(lambda engine: one(engine, seed=4, **filters))
    ids = torch.tensor([[*PROMPT, *answer.token_ids]])
    with torch.inference_mode():
        logits = models["untied"].load()(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    expected = sampling_logprobs(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **filters})
    assert close(answer.logprobs, expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].tolist())


def test_greedy_decoding_reports_the_untempered_distribution(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    reference = models["untied"].load()
    answer = on_engine(lambda engine: one(engine, temperature=0.0))
    assert close(answer.logprobs, logprobs_of(reference, PROMPT, answer.token_ids))
    again = on_engine(lambda engine: one(engine, temperature=0.0, top_k=5, top_p=0.5))
    assert again.token_ids == answer.token_ids


def test_a_distribution_with_one_token_has_the_log_probability_zero(on_engine: Callable[..., Any]) -> None:
    answer = on_engine(lambda engine: one(engine, temperature=0.5, top_k=1))
    assert set(answer.logprobs) == {0.0}


@OLDER
@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_release_that_cannot_score_the_settings_refuses_them(
    on_engine: Callable[..., Any], release: str, sampling: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="logprobs_mode"):
        on_engine(lambda engine: one(engine, **sampling))


def test_a_seed_decides_and_no_seed_is_not_the_engines_zero(on_engine: Callable[..., Any]) -> None:
    async def scenario(engine: TrtllmEngine) -> list[Completion]:
        return await engine.generate([request(seed=8), request(seed=8), *[request() for _ in range(4)]])

    first, second, *unseeded = on_engine(scenario)
    assert first.token_ids == second.token_ids
    assert len({answer.token_ids for answer in unseeded}) > 1


def _stop_after(engine_answer: Completion, place: int) -> int:
    return engine_answer.token_ids[place]


@pytest.mark.parametrize("repeated", [0, 1, 3])
def test_a_sampled_stop_token_is_kept_once_with_its_log_probability(
    on_engine: Callable[..., Any], models: dict[str, TinyModel], quirks: Any, repeated: int
) -> None:
    reference = models["untied"].load()
    free = on_engine(lambda engine: one(engine, seed=2))
    stop = _stop_after(free, 4)
    place = free.token_ids.index(stop)
    quirks.repeated_stop_tokens = repeated
    answer = on_engine(lambda engine: one(engine, seed=2, stop_token_ids=(stop,)))
    assert answer.token_ids == free.token_ids[: place + 1]
    assert answer.stop_reason == "stop"
    assert close(answer.logprobs, logprobs_of(reference, PROMPT, answer.token_ids))


def test_a_stop_token_in_the_prompt_stops_nothing(on_engine: Callable[..., Any]) -> None:
    free = on_engine(lambda engine: one(engine, prompt=(5, 50, 4), seed=2, tokens=3))
    assert 50 not in free.token_ids
    answer = on_engine(lambda engine: one(engine, prompt=(5, 50, 4), seed=2, tokens=3, stop_token_ids=(50,)))
    assert (answer.token_ids, answer.stop_reason) == (free.token_ids, "length")


def test_f6_what_the_models_folder_says_about_sampling_and_ends_is_neutralised(
    double: Any, models: dict[str, TinyModel], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["untied"].folder, folder)
    said = {"top_p": 0.8, "top_k": 20, "temperature": 0.7, "repetition_penalty": 1.05, "min_p": 0.0}
    (folder / "generation_config.json").write_text(json.dumps(said))

    async def scenario() -> Any:
        engine = TrtllmEngine(TrtllmSettings(str(folder), max_context=CONTEXT), check=lambda: None)
        await engine.start()
        await one(engine)
        (asked,) = engine._llm.submitted
        await engine.shutdown(1)
        return asked

    asked = asyncio.run(scenario())
    assert (asked.temperature, asked.top_p, asked.top_k, asked.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert asked.min_p is None
    assert (asked.end_id, asked.stop_token_ids) == (-1, None), "the model's own end token must stop nothing"


def test_an_answer_is_clamped_to_the_context(on_engine: Callable[..., Any]) -> None:
    answer = on_engine(lambda engine: one(engine, tokens=100), max_context=10)
    assert (len(answer.token_ids), answer.stop_reason) == (10 - len(PROMPT), "length")


def test_f1_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    on_engine: Callable[..., Any],
) -> None:
    async def scenario(engine: TrtllmEngine) -> int:
        with pytest.raises(ContextOverflowError, match=r"48 tokens .* context of 48"):
            await engine.generate([request(), request((1,) * CONTEXT)])
        return len(engine._llm.submitted)

    assert on_engine(scenario) == 0


@pytest.mark.parametrize("prompt", [(), (0, VOCAB), (-1,)])
def test_a_prompt_that_is_none_is_refused(on_engine: Callable[..., Any], prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError):
        on_engine(lambda engine: one(engine, prompt=prompt))


def test_equal_prompts_share_their_prefix_and_nothing_changes(
    on_engine: Callable[..., Any], models: dict[str, TinyModel]
) -> None:
    async def scenario(engine: TrtllmEngine) -> Any:
        first = await one(engine, seed=1)
        second = await one(engine, seed=5)
        return first, second, [handle.cached_tokens for handle in engine._llm.handles]

    _, second, cached = on_engine(scenario)
    assert cached == [0, len(PROMPT) - 1]
    assert close(second.logprobs, logprobs_of(models["untied"].load(), PROMPT, second.token_ids))
    assert on_engine(scenario, prefix_cache=False)[2] == [0, 0]


def test_a_request_that_takes_too_long_is_aborted(on_engine: Callable[..., Any], quirks: Any) -> None:
    async def forever(handle: Any) -> None:
        await asyncio.sleep(0.01)

    async def scenario(engine: TrtllmEngine) -> Any:
        quirks.on_step = forever
        with pytest.raises(DeadlineError, match=r"longer than 0\.05 s"):
            await one(engine, tokens=40)
        return engine._llm.handles[0].is_aborted, (await engine.health())["in_flight"]

    assert on_engine(scenario, request_timeout_s=0.05) == (True, 0)


def test_giving_up_a_call_aborts_its_requests(on_engine: Callable[..., Any], quirks: Any) -> None:
    async def forever(handle: Any) -> None:
        await asyncio.sleep(0.01)

    async def scenario(engine: TrtllmEngine) -> list[bool]:
        quirks.on_step = forever
        task = asyncio.ensure_future(engine.generate([request(tokens=40), request(tokens=40)]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [handle.is_aborted for handle in engine._llm.handles]

    assert on_engine(scenario) == [True, True]


def test_a_dead_worker_is_a_dead_engine(on_engine: Callable[..., Any], quirks: Any) -> None:
    died = pytest.importorskip("ray.exceptions").ActorDiedError()

    async def die(handle: Any) -> None:
        raise died

    async def scenario(engine: TrtllmEngine) -> None:
        quirks.on_step = die
        for call in (lambda: one(engine), engine.probe):
            with pytest.raises(EngineDeadError) as caught:
                await call()
            assert caught.value.__cause__ is died
            assert caught.value.kind == "infra"

    on_engine(scenario)


def test_an_unknown_error_is_loud(on_engine: Callable[..., Any], quirks: Any) -> None:
    async def fail(handle: Any) -> None:
        raise KeyError("x")

    async def scenario(engine: TrtllmEngine) -> None:
        quirks.on_step = fail
        with pytest.raises(GenerationError) as caught:
            await one(engine)
        assert (type(caught.value), caught.value.kind) == (GenerationError, "data")

    on_engine(scenario)


def test_an_abort_of_somebody_else_is_no_answer(on_engine: Callable[..., Any], quirks: Any) -> None:
    async def cut(handle: Any) -> None:
        if len(handle.outputs[0].token_ids) == 2:
            handle.abort()

    async def scenario(engine: TrtllmEngine) -> None:
        quirks.on_step = cut
        with pytest.raises(InfraError, match="nobody aborted"):
            await one(engine)

    on_engine(scenario)


def test_a_probe_samples_for_real(on_engine: Callable[..., Any]) -> None:
    async def scenario(engine: TrtllmEngine) -> Any:
        await engine.probe()
        return [len(handle.outputs[0].token_ids) for handle in engine._llm.handles]

    assert on_engine(scenario) == [1]


def test_a_hung_engine_fails_its_probe_in_time(on_engine: Callable[..., Any], quirks: Any) -> None:
    async def forever(handle: Any) -> None:
        await asyncio.sleep(0.5)

    async def scenario(engine: TrtllmEngine) -> None:
        quirks.on_step = forever
        with pytest.raises(DeadlineError, match="probe"):
            await engine.probe()

    on_engine(scenario, probe_timeout_s=0.05)


def test_health_answers_in_every_state(double: Any, models: dict[str, TinyModel], release: str) -> None:
    async def scenario() -> list[str]:
        engine = TrtllmEngine(
            TrtllmSettings(str(models["untied"].folder), max_context=CONTEXT), check=lambda: None
        )
        states = [(await engine.health())["state"]]
        with pytest.raises(NotReadyError):
            await one(engine)
        facts = await engine.start()
        assert (facts.max_context, facts.vocab_size, facts.weight_version) == (CONTEXT, VOCAB, 0)
        answer = await one(engine)
        health = await engine.health()
        assert health["sampled_tokens"] == len(answer.token_ids)
        assert health["release"] == release
        assert health["scores_any_distribution"] is (release == "1.3.0")
        states.append(health["state"])
        await engine.pause()
        states.append((await engine.health())["state"])
        await engine.resume()
        await engine.shutdown(1.0)
        await engine.shutdown(1.0)
        with pytest.raises(EngineDeadError):
            await one(engine)
        return [*states, (await engine.health())["state"]]

    assert asyncio.run(scenario()) == ["starting", "running", "paused", "closed"]


def test_a_start_that_takes_too_long_ends_its_workers(
    double: Any, models: dict[str, TinyModel], quirks: Any
) -> None:
    quirks.setup_delay_s = 5.0

    async def scenario() -> None:
        settings = TrtllmSettings(str(models["untied"].folder), max_context=CONTEXT, start_timeout_s=0.3)
        with pytest.raises(DeadlineError, match="not ready"):
            await TrtllmEngine(settings, check=lambda: None).start()

    asyncio.run(scenario())


def test_a_context_beyond_the_models_positions_is_refused(double: Any, models: dict[str, TinyModel]) -> None:
    settings = TrtllmSettings(str(models["untied"].folder), max_context=CONTEXT + 1)
    with pytest.raises(RequestError, match="positions"):
        asyncio.run(TrtllmEngine(settings, check=lambda: None).start())


def test_a_folder_without_a_model_is_named(double: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.json"):
        asyncio.run(TrtllmEngine(TrtllmSettings(str(tmp_path)), check=lambda: None).start())


def test_an_argument_that_the_release_does_not_know_is_an_error(
    double: Any, models: dict[str, TinyModel]
) -> None:
    settings = TrtllmSettings(
        str(models["untied"].folder), max_context=CONTEXT, llm_arguments={"nonsense": 1}
    )
    with pytest.raises(GenerationError, match="nonsense"):
        asyncio.run(TrtllmEngine(settings, check=lambda: None).start())
