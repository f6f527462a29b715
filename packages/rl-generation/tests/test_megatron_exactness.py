"""Tokens and log-probabilities of the megatron engine against the model's plain forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_generation import Completion, GenerationRequest, SamplingParams
from rl_generation.megatron import MegatronGeneration, cache, layer_session
from rl_generation.sampling import sampling_logprobs

VOCAB = 61
PROMPTS = [(5, 9, 2), (7,), (5, 9, 2), (1, 2, 3, 4, 5, 6, 7, 8), (30, 31, 32, 33), (8, 8, 8, 8, 8)]
PATHS = ["layers", "model"]


def engine(model: Any, **changes: Any) -> MegatronGeneration:
    return MegatronGeneration(model, **{"vocab_size": VOCAB, "max_context": 64, **changes})


def requests(**settings: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, SamplingParams(**{"max_new_tokens": 6 + 3 * i, "seed": i, **settings}))
        for i, prompt in enumerate(PROMPTS)
    ]


def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """``[S, VOCAB]`` float32 logits of one unpadded sequence, without any cache."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return model(ids, torch.arange(len(tokens))[None], None)[0, :, :VOCAB].float()


def rescored(model: Any, request: GenerationRequest, answer: Completion) -> Tensor:
    """Log-probabilities of the answer's tokens under the request's settings, by a full forward pass."""
    sampling = request.sampling
    logits = logits_of(model, request.prompt_token_ids + answer.token_ids)
    logits = logits[len(request.prompt_token_ids) - 1 : -1]
    if sampling.temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
    else:
        logprobs = sampling_logprobs(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    return logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]


def worst_error(model: Any, asked: Sequence[GenerationRequest], answers: Sequence[Completion]) -> float:
    errors = [
        (rescored(model, request, answer) - torch.tensor(answer.logprobs)).abs().max().item()
        for request, answer in zip(asked, answers, strict=True)
    ]
    return max(errors)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 9},
        {"temperature": 0.8, "top_p": 0.7, "top_k": 30},
    ],
)
def test_d5_log_probabilities_are_those_of_the_settings(
    model: Any, path: str, settings: dict[str, Any]
) -> None:
    """BUGS D5: sampler and scorer use one distribution; prompts of different lengths share a batch."""
    asked = requests(**settings)
    answers = engine(model, path=path).generate(asked)
    assert [len(a.token_ids) for a in answers] == [r.sampling.max_new_tokens for r in asked]
    assert worst_error(model, asked, answers) < 2e-5
    assert all(a.stop_reason == "length" for a in answers)


@pytest.mark.parametrize("path", PATHS)
def test_greedy_decoding_follows_the_most_likely_token(model: Any, path: str) -> None:
    asked = requests(temperature=0, top_k=3, top_p=0.2)
    answers = engine(model, path=path).generate(asked)
    for request, answer in zip(asked, answers, strict=True):
        tokens = list(request.prompt_token_ids)
        for _ in range(request.sampling.max_new_tokens):
            tokens.append(int(logits_of(model, tokens)[-1].argmax()))
        assert answer.token_ids == tuple(tokens[len(request.prompt_token_ids) :])
    assert worst_error(model, asked, answers) < 2e-5


@pytest.mark.parametrize(
    "overrides",
    [
        {"tied": False, "qk_layernorm": False, "num_query_groups": 4},
        {"num_query_groups": 1, "add_qkv_bias": True},
        {"add_bias_linear": True, "softmax_scale": 0.5},
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu, "add_bias_linear": True},
    ],
)
def test_other_shapes_of_the_model(build_model: Callable[..., Any], overrides: dict[str, Any]) -> None:
    model = build_model(seed=3, **overrides)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    asked = requests(temperature=0.9)
    assert worst_error(model, asked, engine(model, path="layers").generate(asked)) < 2e-5


@pytest.mark.parametrize(
    "part",
    [
        "embedding",
        "embedding.word_embeddings",
        "decoder.layers.1.input_layernorm",
        "decoder.layers.1.self_attention.linear_qkv",
        "decoder.layers.1.self_attention.k_layernorm",
        "decoder.layers.1.self_attention.linear_proj",
        "decoder.layers.1.mlp",
        "decoder.layers.1.mlp.linear_fc1",
        "decoder.final_layernorm",
        "output_layer",
    ],
)
def test_a_part_that_carries_a_hook_is_called(model: Any, part: str) -> None:
    def double(module: Any, args: Any, out: Any) -> Any:
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    asked = requests()[:3]
    plain = engine(model, path="layers").generate(asked)
    hook = model.get_submodule(part).register_forward_hook(double)
    try:
        answers = engine(model, path="layers").generate(asked)
        assert worst_error(model, asked, answers) < 2e-5
        assert [a.logprobs for a in answers] != [a.logprobs for a in plain]
    finally:
        hook.remove()


def test_norms_of_queries_and_keys_may_differ(build_model: Callable[..., Any]) -> None:
    model = build_model(seed=11)
    attention = model.decoder.layers[0].self_attention
    attention.q_layernorm.eps, attention.k_layernorm.eps = 0.3, 0.0
    model.decoder.layers[1].input_layernorm.eps = None
    with torch.no_grad():
        attention.q_layernorm.weight.mul_(3)
    asked = requests()[:3]
    assert worst_error(model, asked, engine(model, path="layers").generate(asked)) < 2e-5


@pytest.mark.parametrize("path", PATHS)
def test_mixtures_of_experts(
    build_model: Callable[..., Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without Transformer Engine megatron-core 0.16 leaves this name undefined, and looks at it.
    monkeypatch.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, raising=False)
    model = build_model(
        seed=8,
        num_moe_experts=4,
        moe_ffn_hidden_size=24,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        moe_aux_loss_coeff=0.0,
    )
    asked = requests(temperature=0.9)
    answers = engine(model, path=path).generate(asked)
    assert worst_error(model, asked, answers) < 2e-5
    alone = [engine(model, path=path).generate([r])[0].token_ids for r in asked]
    assert alone == [a.token_ids for a in answers]


def test_frequencies_follow_the_distribution(model: Any) -> None:
    n = 4000
    settings = {"temperature": 1.2, "top_p": 0.9}
    asked = [GenerationRequest((4, 4, 17), SamplingParams(1, seed=i, **settings)) for i in range(n)]
    counts = Counter(a.token_ids[0] for a in engine(model, max_batch=2000).generate(asked))
    p = sampling_logprobs(logits_of(model, (4, 4, 17))[-1:], 1.2, 0, 0.9)[0].double().exp()
    observed = torch.tensor([counts[t] for t in range(VOCAB)], dtype=torch.float64)
    assert observed[p == 0].sum() == 0
    live = p * n > 5
    chi2 = ((observed - n * p)[live] ** 2 / (n * p)[live]).sum().item()
    freedom = int(live.sum()) - 1
    assert freedom > 5
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("path", PATHS)
def test_a_seeded_request_does_not_depend_on_its_batch(model: Any, path: str) -> None:
    asked = requests(temperature=0.9)
    together = engine(model, path=path).generate(asked)
    alone = [engine(model, path=path).generate([r])[0] for r in asked]
    backwards = engine(model, path=path).generate(asked[::-1])[::-1]
    by_two = engine(model, path=path, max_batch=2).generate(asked)
    for other in (alone, backwards, by_two):
        assert [a.token_ids for a in other] == [a.token_ids for a in together]
        for a, b in zip(other, together, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_the_same_prompt_with_other_seeds_gives_other_answers(model: Any) -> None:
    asked = [GenerationRequest((3, 1), SamplingParams(12, seed=s)) for s in (None, None, 1, 2, 1)]
    answers = [a.token_ids for a in engine(model).generate(asked)]
    assert answers[2] == answers[4]
    assert len(set(answers)) == 4


def test_f7_asking_a_prompt_again_gives_the_same_values(model: Any) -> None:
    """BUGS F7: A, then AB, then A; nothing of an earlier call may show in a later one."""
    a = GenerationRequest((9, 8, 7, 6), SamplingParams(10, seed=5))
    ab = GenerationRequest((9, 8, 7, 6, 5, 4), SamplingParams(10, seed=5))
    generation = engine(model)
    first, _, again = (generation.generate([r])[0] for r in (a, ab, a))
    assert first == again


def test_padding_of_the_vocabulary_is_never_sampled(build_model: Callable[..., Any]) -> None:
    model = build_model(seed=1, tied=False)
    with torch.no_grad():
        # Padding columns that would win every draw.
        model.output_layer.weight[VOCAB:] = model.output_layer.weight[:VOCAB].sum(0) * 50
        model.output_layer.weight[VOCAB + 1] *= -1
    asked = requests()
    answers = engine(model).generate(asked)
    assert max(t for a in answers for t in a.token_ids) < VOCAB
    assert worst_error(model, asked, answers) < 2e-5


def test_stop_tokens_and_limits_are_each_row_s_own(model: Any) -> None:
    base = [GenerationRequest((3, 1), SamplingParams(20, seed=s)) for s in range(6)]
    free = engine(model).generate(base)
    asked = [
        GenerationRequest(
            (3, 1), SamplingParams(20 - s, seed=s, stop_token_ids=(a.token_ids[3 + s],) * (s % 3))
        )
        for s, a in enumerate(free)
    ]
    for request, answer, whole in zip(asked, engine(model).generate(asked), free, strict=True):
        expected = list(whole.token_ids[: request.sampling.max_new_tokens])
        reason = "length"
        for stop in request.sampling.stop_token_ids[:1]:
            if stop in expected:
                expected, reason = expected[: expected.index(stop) + 1], "stop"
        assert (answer.token_ids, answer.stop_reason) == (tuple(expected), reason)


def test_the_context_ends_a_row_that_fills_it(model: Any) -> None:
    asked = [GenerationRequest((1,) * n, SamplingParams(50, seed=n)) for n in (1, 10, 15)]
    answers = engine(model, max_context=16).generate(asked)
    assert [(len(a.token_ids), a.stop_reason) for a in answers] == [
        (15, "length"),
        (6, "length"),
        (1, "length"),
    ]
    assert worst_error(model, asked, answers) < 2e-5


def test_long_prompts_in_chunks_and_a_growing_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written holds NaN here, so that reading any of it would show."""
    monkeypatch.setattr(layer_session, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(cache, "_FIRST_ROOM", 1)
    allocate = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *shape: allocate(self, *shape).fill_(float("nan"))
    )
    asked = requests(temperature=0.9)
    answers = engine(model, path="layers").generate(asked)
    assert worst_error(model, asked, answers) < 2e-5


def test_a_prompt_shared_by_a_group_is_run_once(model: Any) -> None:
    seen: list[tuple[int, ...]] = []
    hook = model.embedding.register_forward_hook(
        lambda module, args, out: seen.append(tuple(args[0].shape)), with_kwargs=False
    )
    try:
        group = [GenerationRequest((3, 1, 4, 1, 5), SamplingParams(3, seed=s)) for s in range(8)]
        engine(model, path="layers").generate(group)
    finally:
        hook.remove()
    assert seen == [(1, 5), (8, 1), (8, 1)]


def test_half_precision(build_model: Callable[..., Any]) -> None:
    model = build_model(seed=2, params_dtype=torch.bfloat16, bf16=True).bfloat16()
    asked = requests(temperature=0.9)
    for path in PATHS:
        answers = engine(model, path=path).generate(asked)
        assert worst_error(model, asked, answers) < 0.25
