"""The megatron engine's behaviour around a generation: checks, modes, weights, states."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_generation import Generation, GenerationError, GenerationRequest, SamplingParams
from rl_generation.failures import ContextOverflowError, DeadlineError, InfraError, InvalidRequestError
from rl_generation.megatron import MegatronGeneration
from rl_generation.protocol import RefitSpec, RefitTensor

PATHS = ["layers", "model"]


def engine(model: Any, **changes: Any) -> MegatronGeneration:
    return MegatronGeneration(model, **{"vocab_size": 61, "max_context": 64, **changes})


def ask(*prompt: int, tokens: int = 5, **settings: Any) -> GenerationRequest:
    return GenerationRequest(prompt or (1, 2, 3), SamplingParams(tokens, **{"seed": 0, **settings}), "r7")


def test_it_is_a_generation_without_servers(model: Any) -> None:
    """BUGS F3: no server is an empty list, not a list of nothing."""
    generation = engine(model)
    assert isinstance(generation, Generation)
    assert generation.base_urls == []
    assert not generation.base_urls


def test_no_requests_no_answers(model: Any) -> None:
    assert engine(model).generate([]) == []


def test_f1_a_prompt_that_fills_the_context_is_refused_before_anything_runs(model: Any) -> None:
    """BUGS F1: the error names 698 and 512; nothing negative, and no other request of the call has run."""
    ran = []
    hook = model.embedding.register_forward_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(ContextOverflowError, match=r"'r7'.*698 tokens.*context of 512") as caught:
            engine(model, max_context=512).generate([ask(), ask(*[1] * 698)])
        assert (caught.value.prompt_tokens, caught.value.max_context) == (698, 512)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.kind) == (str(caught.value), "data")
        with pytest.raises(ContextOverflowError, match=r"64 tokens.*context of 64"):
            engine(model).generate([ask(*[1] * 64)])
    finally:
        hook.remove()
    assert ran == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [((), "empty prompt"), ((1, 61), r"1\.\.61, outside the vocabulary 0\.\.60"), ((-1, 5), r"-1\.\.5")],
)
def test_prompts_that_cannot_be_embedded_are_refused(
    model: Any, prompt: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine(model).generate([GenerationRequest(prompt, SamplingParams(2))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65}, "64 logits, so vocab_size=65"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"max_context": 1}, "max_context=1"),
        ({"max_batch": 0}, "max_batch=0"),
    ],
)
def test_unsuitable_limits_are_refused(model: Any, changes: dict[str, int], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        engine(model, **changes)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("context_parallel_size", 2),
        ("expert_model_parallel_size", 2),
        ("sequence_parallel", True),
        ("moe_expert_capacity_factor", 1.25),
    ],
)
def test_models_that_one_process_cannot_decode_exactly_are_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any
) -> None:
    monkeypatch.setattr(model.config, setting, value)
    with pytest.raises(GenerationError, match=setting.split("_parallel")[0].replace("_model", "")):
        engine(model)


def test_what_a_server_has_to_know_is_readable(model: Any) -> None:
    generation = engine(model, max_context=40)
    assert (generation.max_context, generation.vocab_size) == (40, 61)


def test_other_models_are_refused(megatron_on_cpu: None) -> None:
    with pytest.raises(GenerationError, match=r"GPTModel.*got Linear"):
        engine(torch.nn.Linear(2, 2))


def test_a_wrapped_model_is_unwrapped(model: Any) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    assert engine(Wrapper(Wrapper(model))).generate([ask()]) == engine(model).generate([ask()])


def test_layers_of_another_kind_go_through_the_model(build_model: Callable[..., Any]) -> None:
    model = build_model(seed=4)

    class OtherAttention(type(model.decoder.layers[1].self_attention)):  # type: ignore[misc]
        pass

    plain = engine(model).generate([ask()])
    model.decoder.layers[1].self_attention.__class__ = OtherAttention
    with pytest.raises(GenerationError, match=r"OtherAttention.*path='auto'"):
        engine(model, path="layers")
    other = engine(model)
    assert other.health()["path"] == "model"
    assert other.generate([ask()])[0].token_ids == plain[0].token_ids


@pytest.mark.parametrize("path", PATHS)
def test_each_module_s_mode_is_restored(build_model: Callable[..., Any], path: str) -> None:
    model = build_model(seed=5)
    model.train()
    frozen = model.decoder.layers[0].mlp
    frozen.eval()
    modes = [m.training for m in model.modules()]
    seen: list[bool] = []
    hook = model.decoder.layers[1].mlp.register_forward_hook(lambda m, *_: seen.append(m.training))
    generation = engine(model, path=path)
    generation.generate([ask()])
    assert [m.training for m in model.modules()] == modes
    assert seen
    assert not any(seen)
    hook.remove()

    def fail(*_: Any) -> None:
        raise MemoryError("full")

    model.decoder.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        generation.generate([ask()])
    assert [m.training for m in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not generation.health()["busy"]


@pytest.mark.parametrize("path", PATHS)
def test_training_after_a_generation_works_and_is_visible_at_once(
    build_model: Callable[..., Any], path: str
) -> None:
    """The very first forward pass of the model is a generation, of as many positions as training has."""
    model = build_model(seed=6)
    model.train()
    generation = engine(model, path=path)
    request = ask(1, 2, 3, tokens=8)
    before = generation.generate([request])[0]
    assert not any(t.is_inference() for m in model.modules() for t in vars(m).values() if torch.is_tensor(t))
    ids = torch.tensor([(1, 2, 3, *before.token_ids)])
    # What megatron remembers of the positions it has seen, whoever asked first.
    assert not model.rotary_pos_emb(ids.shape[1], packed_seq=False, cp_group=None).is_inference()
    logits = model(ids, torch.arange(ids.shape[1])[None], None)
    (-torch.log_softmax(logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])).mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            assert weight.grad is not None
            weight -= 0.5 * weight.grad
    after = generation.generate([request])[0]
    assert after.token_ids != before.token_ids or after.logprobs != before.logprobs
    model.eval()
    with torch.no_grad():
        ids = torch.tensor([(1, 2, 3, *after.token_ids)])
        logits = model(ids, torch.arange(ids.shape[1])[None], None)[0, 2:-1, :61].float()
    fresh = torch.log_softmax(logits, -1).gather(1, torch.tensor(after.token_ids)[:, None])[:, 0]
    assert after.logprobs == pytest.approx(fresh.tolist(), abs=1e-5)


def test_g1_no_cached_token_outlives_the_weights(build_model: Callable[..., Any]) -> None:
    """BUGS G1: prompt P at v1, an update, P at v2: all of P runs again, as in an engine that never saw v1."""
    model = build_model(seed=9)
    generation = engine(model, weight_version=1)
    prompt = (4, 8, 15, 16, 23, 42)
    first = generation.generate([ask(*prompt)])[0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    generation.update_weights((), 2)
    widths: list[int] = []
    hook = model.embedding.register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    second = generation.generate([ask(*prompt)])[0]
    hook.remove()
    assert widths == [len(prompt), 1, 1, 1, 1]
    assert (first.weight_version, second.weight_version) == (1, 2)
    assert second.logprobs != first.logprobs
    fresh = engine(model).generate([ask(*prompt)])[0]
    assert (fresh.token_ids, fresh.logprobs) == (
        second.token_ids,
        pytest.approx(second.logprobs, abs=1e-5),
    )


def test_a_refit_moves_nothing_but_the_version(model: Any) -> None:
    generation = engine(model, weight_version=3)
    assert generation.generate([ask()])[0].weight_version == 3
    generation.prepare_refit(RefitSpec(()))
    generation.update_weights([], 5)
    assert generation.weight_version == 5
    assert generation.generate([ask()])[0].weight_version == 5
    for version in (5, 4):
        with pytest.raises(GenerationError, match=rf"must grow, got {version} after 5"):
            generation.update_weights([], version)


def test_tensors_for_shared_weights_are_refused(model: Any) -> None:
    generation = engine(model)
    with pytest.raises(GenerationError, match=r"model\.norm\.weight"):
        generation.prepare_refit(RefitSpec((RefitTensor("model.norm.weight", (32,), torch.float32),)))
    with pytest.raises(GenerationError, match=r"model\.norm\.weight.*empty stream"):
        generation.update_weights(iter([("model.norm.weight", torch.zeros(32))]), 1)
    assert generation.weight_version == 0


def test_asleep_and_awake(model: Any) -> None:
    generation = engine(model)
    generation.sleep()
    assert generation.health()["state"] == "asleep"
    with pytest.raises(InfraError, match="asleep"):
        generation.generate([ask()])
    generation.update_weights([], 1)
    generation.wake()
    assert generation.generate([ask()])[0].weight_version == 1


def test_a_pause_holds_a_generation_between_two_tokens(model: Any) -> None:
    generation = engine(model)
    whole = generation.generate([ask(tokens=20)])
    reached = threading.Event()

    def pause_at_third_step(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            generation.pause()
            reached.set()

    calls: list[int] = []
    hook = model.embedding.register_forward_hook(pause_at_third_step)
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.extend(generation.generate([ask(tokens=20)])), daemon=True
    )
    try:
        thread.start()
        assert reached.wait(10)
        time.sleep(0.1)
        assert generation.health() | {"tokens": 0, "requests": 0} == {
            "backend": "megatron",
            "state": "paused",
            "busy": True,
            "path": "layers",
            "weight_version": 0,
            "requests": 0,
            "tokens": 0,
        }
        assert len(calls) == 3
        with pytest.raises(GenerationError, match="in flight"):
            generation.update_weights([], 1)
        generation.resume()
        thread.join(10)
    finally:
        hook.remove()
    assert answers == whole


def test_shutdown_aborts_a_generation_and_is_final(model: Any) -> None:
    generation = engine(model)
    hook = model.embedding.register_forward_hook(
        lambda *_: (
            generation.health()["busy"] and generation.shutdown(0) if len(calls) == 4 else calls.append(1)
        )
    )
    calls: list[int] = []
    try:
        answer = generation.generate([ask(tokens=20)])[0]
    finally:
        hook.remove()
    assert (len(answer.token_ids), len(answer.logprobs), answer.stop_reason) == (4, 4, "aborted")
    generation.shutdown(1)
    for use in (
        lambda: generation.generate([ask()]),
        lambda: generation.update_weights([], 9),
        lambda: generation.prepare_refit(RefitSpec(())),
        generation.pause,
        generation.resume,
        generation.sleep,
        generation.wake,
        lambda: asyncio.run(generation.generate_async(ask())),
    ):
        with pytest.raises(InfraError, match="used after shutdown"):
            use()
    assert generation.health()["state"] == "closed"
    assert generation.base_urls == []


def test_a_pause_that_nobody_ends_is_an_error_of_the_engine(model: Any) -> None:
    generation = engine(model, wait_timeout_s=0.05)
    generation.pause()
    with pytest.raises(DeadlineError, match=r"paused for more than 0\.05 s"):
        generation.generate([ask()])
    assert DeadlineError.kind == "infra"


def test_generate_async_answers_many_callers(model: Any) -> None:
    generation = engine(model)
    asked = [ask(1, 2, s, seed=s) for s in range(6)]

    async def everyone() -> list[Any]:
        return await asyncio.gather(*(generation.generate_async(r) for r in asked))

    answers = asyncio.run(everyone())
    assert [a.token_ids for a in answers] == [a.token_ids for a in generation.generate(asked)]
    assert generation.health()["requests"] == 12
    assert generation.health()["tokens"] == 2 * 6 * 5


def test_weights_that_are_not_numbers_are_an_error(build_model: Callable[..., Any]) -> None:
    model = build_model(seed=7)
    with torch.no_grad():
        model.decoder.final_layernorm.weight[0] = float("nan")
    with pytest.raises(GenerationError, match="not finite"):
        engine(model).generate([ask()])


def test_importing_the_package_imports_torch_and_no_engine() -> None:
    code = (
        "import sys, rl_generation, rl_generation.megatron\n"
        "bad = {'megatron', 'ray', 'vllm', 'transformers', 'tensorrt_llm'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
