"""The asynchronous engine on a tiny model: exact log-probabilities, seeds, limits, pauses, refusals."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_generation.failures import (
    ContextOverflowError,
    DeadlineError,
    GenerationError,
    InvalidRequestError,
)
from rl_generation.protocol import Completion, Generation, GenerationRequest, SamplingParams
from rl_generation.vllm import VllmEngine
from rl_generation.vllm.core import EngineCore

tools = importlib.import_module("packages.rl-generation.tests.vllm.lab")
reach, requests_of, settings_for = tools.reach, tools.requests_of, tools.settings_for
CONTEXT, VOCAB = tools.CONTEXT, tools.VOCAB

EXACT = 2e-5


@pytest.fixture
def lab(labs: Callable[[str], Any]) -> Any:
    return labs("tied")


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_d5_logprobs_are_of_the_distribution_sampled_from(lab: Any, sampling: dict[str, float]) -> None:
    requests = requests_of(12, 16, **sampling)
    completions = lab.engine.generate(requests)
    assert lab.reference.worst(requests, completions) < EXACT
    ratios = torch.cat(
        [
            (lab.reference.logprobs(r, c.token_ids, c.weight_version) - torch.tensor(c.logprobs)).exp()
            for r, c in zip(requests, completions, strict=True)
        ]
    )
    assert torch.allclose(ratios, torch.ones_like(ratios), atol=1e-4)


def test_a_batch_of_different_settings_is_exact_row_by_row(lab: Any) -> None:
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 5}, {"top_p": 0.7}]
    requests = [
        GenerationRequest((1 + row, 2, 3), SamplingParams(10, seed=row, **kinds[row % 4]))
        for row in range(16)
    ]
    completions = lab.engine.generate(requests)
    assert lab.reference.worst(requests, completions) < EXACT
    greedy = lab.reference.models[0].generate(
        torch.tensor([requests[0].prompt_token_ids]), max_new_tokens=10, do_sample=False, eos_token_id=None
    )
    assert completions[0].token_ids == tuple(greedy[0, 3:].tolist())


def test_f6_the_models_own_sampling_defaults_never_apply(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("tied"), folder)
    defaults = {"temperature": 0.3, "top_p": 0.2, "top_k": 2, "repetition_penalty": 1.5, "eos_token_id": 5}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    engine = VllmEngine(settings_for(folder, "vllm-defaults"))
    engine.start()
    try:
        requests = requests_of(16, 16)
        completions = engine.generate(requests)
    finally:
        engine.shutdown(20.0)
    assert tools.Reference(folder, tmp_path).worst(requests, completions) < EXACT
    assert {len(completion.token_ids) for completion in completions} == {16}


def test_a_seed_decides_its_request_whatever_runs_beside_it(lab: Any) -> None:
    (alone,) = lab.engine.generate(requests_of(1, 16, seed=11))
    crowd = lab.engine.generate([*requests_of(1, 16, seed=11), *requests_of(9, 16, seed=50)])
    assert alone.token_ids == crowd[0].token_ids
    prompt = (1, 2, 3)
    # Low bits alone would make these the same.
    seeds = [0, 1 << 32, 2 << 32, 1]
    others = lab.engine.generate([GenerationRequest(prompt, SamplingParams(16, seed=seed)) for seed in seeds])
    assert len({completion.token_ids for completion in others}) == 4
    unseeded = lab.engine.generate([GenerationRequest(prompt, SamplingParams(16)) for _ in range(4)])
    assert len({completion.token_ids for completion in unseeded}) == 4


def test_seeded_prompts_of_more_tokens_than_a_step_takes_are_sampled_as_if_alone(lab: Any) -> None:
    """vLLM takes 2,048 a step, splits the prompt that crosses that bound, and on a CPU died of its seed."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, VOCAB, (96, CONTEXT - 8), generator=generator).tolist()
    requests = [
        GenerationRequest(tuple(prompt), SamplingParams(4, seed=row)) for row, prompt in enumerate(prompts)
    ]
    assert 32 * (CONTEXT - 8) > 2048, "as many as it takes at once have to have more tokens than that"
    completions = lab.engine.generate(requests)
    assert lab.reference.worst(requests, completions) < EXACT
    for row in (0, 23, 55, 95):
        assert lab.engine.generate([requests[row]])[0].token_ids == completions[row].token_ids


def test_replicas_of_a_job_do_not_sample_the_same(model_folder: Callable[[str], Path]) -> None:
    seeds = {
        settings_for(model_folder("tied"), "x", seed=3, replica=replica).engine_seed for replica in range(8)
    }
    assert len(seeds) == 8


def test_a_stop_token_ends_a_request_and_is_kept(lab: Any) -> None:
    (free,) = lab.engine.generate([GenerationRequest((1, 2), SamplingParams(20, temperature=0.0))])
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    sampling = SamplingParams(20, temperature=0.0, stop_token_ids=(stop,))
    (stopped,) = lab.engine.generate([GenerationRequest((1, 2), sampling)])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.stop_reason, free.stop_reason) == ("stop", "length")
    assert len(stopped.logprobs) == first + 1


def test_f1_a_prompt_that_fills_the_context_is_refused_with_both_numbers(lab: Any) -> None:
    with pytest.raises(ContextOverflowError) as caught:
        lab.engine.generate([GenerationRequest((1,) * (CONTEXT + 90), SamplingParams(4))])
    assert (caught.value.prompt_tokens, caught.value.max_context) == (CONTEXT + 90, CONTEXT)
    with pytest.raises(ContextOverflowError):
        lab.engine.generate([GenerationRequest((1,) * CONTEXT, SamplingParams(4))])
    (last,) = lab.engine.generate([GenerationRequest((1,) * (CONTEXT - 1), SamplingParams(4, seed=1))])
    assert (len(last.token_ids), last.stop_reason) == (1, "length")
    (clamped,) = lab.engine.generate([GenerationRequest((1,) * (CONTEXT - 5), SamplingParams(400, seed=1))])
    assert len(clamped.token_ids) == 5


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (GenerationRequest((), SamplingParams(4)), "empty prompt"),
        (GenerationRequest((1, VOCAB), SamplingParams(4)), f"{VOCAB} lies outside"),
        (GenerationRequest((-1,), SamplingParams(4)), "-1 lies outside"),
        (GenerationRequest((1,), SamplingParams(4, temperature=0.001)), "temperature of 0.001"),
    ],
    ids=["empty", "beyond", "negative", "cold"],
)
def test_what_could_not_be_scored_is_refused(lab: Any, request_: GenerationRequest, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        lab.engine.generate([request_])


def test_f7_prompt_logprobs_of_a_cached_prefix_are_computed(lab: Any) -> None:
    first = tuple((3 * place) % VOCAB for place in range(1, 40))
    both = (*first, *range(1, 30))
    lab.engine.generate([GenerationRequest(first, SamplingParams(2, seed=0))])
    once, longer, again = (lab.engine.score(tokens) for tokens in (first, both, first))
    assert once == again
    assert longer[: len(once)] == pytest.approx(once, abs=EXACT)
    expected = lab.reference.logprobs(
        GenerationRequest(both[:1], SamplingParams(1)), both[1:], lab.engine.weight_version
    )
    assert (expected - torch.tensor(longer)).abs().max() < EXACT


def test_the_most_likely_tokens_of_given_ones_are_the_models_own(lab: Any) -> None:
    sequences = [tuple((5 * place + 1) % VOCAB for place in range(length)) for length in (9, 4)]
    model = lab.reference.models[lab.engine.weight_version]
    for tokens, found in zip(sequences, lab.engine.score_all(sequences, 6), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        wanted = logits.topk(6, dim=1)
        assert (torch.from_numpy(found.top_logprobs.copy()) - wanted.values).abs().max() < EXACT
        assert (torch.from_numpy(found.top_ids.copy()) == wanted.indices).float().mean() > 0.9
        own = logits.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        assert (torch.tensor(found.logprobs) - own).abs().max() < EXACT
    assert lab.engine.score_all([], 6) == []


def test_a_pause_keeps_what_a_request_has_and_nothing_is_sampled_meanwhile(lab: Any) -> None:
    requests = requests_of(4, 80, prompt=4)
    expected = lab.engine.generate(requests)

    async def run() -> list[int]:
        before = (await lab.engine.health_async())["sampled_tokens"]
        pending = [asyncio.ensure_future(lab.engine.generate_async(request)) for request in requests]
        await reach(lab.engine, before + 20)
        await lab.engine.pause_async()
        held = (await lab.engine.health_async())["sampled_tokens"]
        late = asyncio.ensure_future(lab.engine.generate_async(requests[0]))
        await asyncio.sleep(0.2)
        facts = await lab.engine.health_async()
        assert (facts["state"], facts["sampled_tokens"], facts["in_flight"]) == ("paused", held, 5)
        await lab.engine.probe()
        await lab.engine.resume_async()
        completions = await asyncio.gather(*pending)
        for completion, alone in zip([*completions, await late], [*expected, expected[0]], strict=True):
            assert_same(completion, alone)
        return [held - before]

    (sampled,) = asyncio.run(run())
    assert 20 <= sampled < 320


def test_a_cancelled_request_ends_inside_the_engine(lab: Any) -> None:
    async def run() -> None:
        before = (await lab.engine.health_async())["sampled_tokens"]
        task = asyncio.ensure_future(lab.engine.generate_async(requests_of(1, 90)[0]))
        await reach(lab.engine, before + 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deadline = time.monotonic() + 10
        while (await lab.engine.health_async())["in_flight"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_request_that_takes_too_long_fails_and_the_engine_goes_on(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = settings_for(lab.folder, lab.engine.name, request_timeout_s=0.2)

    async def run(core: EngineCore) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(core, "_settings", short)
            await core.pause()
            with pytest.raises(DeadlineError, match=r"vllm-tied.* within 0\.2 s"):
                await core.generate(requests_of(2))
        assert core._driver.in_flight() == 0
        await core.resume()
        assert len(await core.generate(requests_of(2))) == 2

    asyncio.run(lab.engine.on_engine_loop(run))


def test_sleep_refuses_requests_until_wake_and_is_refused_during_one(lab: Any) -> None:
    (before,) = lab.engine.generate(requests_of(1))

    async def busy() -> None:
        await lab.engine.pause_async()
        task = asyncio.ensure_future(lab.engine.generate_async(requests_of(1)[0]))
        while not (await lab.engine.health_async())["in_flight"]:
            await asyncio.sleep(0.01)
        with pytest.raises(GenerationError, match="in flight"):
            await lab.engine.sleep_async()
        await lab.engine.resume_async()
        assert_same(await task, before)

    asyncio.run(busy())
    lab.engine.sleep()
    assert lab.engine.health()["state"] == "asleep"
    with pytest.raises(GenerationError, match=r"wake\(\)"):
        lab.engine.generate(requests_of(1))
    lab.engine.wake()
    assert_same(lab.engine.generate(requests_of(1))[0], before)


def test_it_is_a_generation_that_serves_no_http(lab: Any) -> None:
    assert isinstance(lab.engine, Generation)
    assert lab.engine.base_urls == []
    assert lab.engine.generate([]) == []
    facts = lab.engine.health()
    assert (facts["state"], facts["weight_version"]) == ("running", lab.engine.weight_version)
    assert facts["pid"] != facts["actor_pid"]

    async def on_a_loop() -> None:
        with pytest.raises(GenerationError, match="_async"):
            lab.engine.generate(requests_of(1))

    asyncio.run(on_a_loop())


def assert_same(completion: Completion, other: Completion) -> None:
    """Up to what the size of a batch does to the order of sums."""
    assert completion.token_ids == other.token_ids
    assert completion.logprobs == pytest.approx(other.logprobs, abs=EXACT)
    assert completion.weight_versions == other.weight_versions
