"""The megatron engine over a real policy, held against ``transformers`` on the same weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl_generation import Completion, GenerationRequest, SamplingParams
from rl_generation.megatron import MegatronGeneration
from rl_generation.sampling import sampling_logprobs
from rl_policy_megatron import MegatronPolicy

VOCAB = 90
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPTS = [(5, 9, 2), (7,), tuple(range(20, 41)), (5, 9, 2), (11, 11, 80, 4, 3, 2, 1)]


@dataclass(frozen=True)
class Batch:
    """The rows that a policy scores or trains on."""

    input_ids: torch.Tensor
    lengths: torch.Tensor

    def select(self, rows: Sequence[int]) -> Batch:
        width = int(self.lengths[list(rows)].max())
        return replace(self, input_ids=self.input_ids[list(rows), :width], lengths=self.lengths[list(rows)])


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Small, so that the sequences here reach the stretched frequencies.
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_scaling=dict(LLAMA3_ROPE))),
}


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One model twice: as a policy with an engine on it, and in ``transformers``."""
    torch.manual_seed(5)
    reference = MODELS[request.param]()
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference.eval().save_pretrained(folder)
    with MegatronPolicy(folder) as policy:
        engine = MegatronGeneration(policy.model, vocab_size=VOCAB, max_context=128)
        yield policy, engine, reference
        engine.shutdown(1.0)


def asked(
    tokens: int = 24, prompts: Sequence[tuple[int, ...]] = PROMPTS, **settings: Any
) -> list[GenerationRequest]:
    return [
        GenerationRequest(p, SamplingParams(tokens, **{"seed": i, **settings})) for i, p in enumerate(prompts)
    ]


def rows_of(requests: Sequence[GenerationRequest], answers: Sequence[Completion]) -> Batch:
    rows = [r.prompt_token_ids + a.token_ids for r, a in zip(requests, answers, strict=True)]
    width = max(map(len, rows))
    return Batch(
        torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]),
        torch.tensor([len(row) for row in rows]),
    )


def errors(
    requests: Sequence[GenerationRequest],
    answers: Sequence[Completion],
    logprobs_of: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Absolute differences to ``logprobs_of(row, tokens)``, which scores the tokens after the prompt."""
    out = []
    for row, answer in enumerate(answers):
        expected = logprobs_of(row, torch.tensor(answer.token_ids))
        out.append((expected - torch.tensor(answer.logprobs)).abs())
    return torch.cat(out)


def test_greedy_tokens_are_those_of_transformers(pair: Any) -> None:
    _, engine, reference = pair
    requests = asked(temperature=0)
    answers = engine.generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        expected = reference.generate(
            torch.tensor([request.prompt_token_ids]), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert answer.token_ids == tuple(expected[0, len(request.prompt_token_ids) :].tolist())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 12},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 40},
    ],
)
def test_log_probabilities_are_those_of_a_full_forward_pass(pair: Any, settings: dict[str, Any]) -> None:
    """Under the same temperature, top-k and top-p, as ``transformers`` warps its own model's logits."""
    _, engine, reference = pair
    requests = asked(**settings)
    answers = engine.generate(requests)

    def rescore(row: int, tokens: torch.Tensor) -> torch.Tensor:
        prompt = requests[row].prompt_token_ids
        ids = torch.cat((torch.tensor(prompt), tokens))[None]
        with torch.no_grad():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
        logits = logits / settings.get("temperature", 1.0)
        if "top_k" in settings:
            logits = TopKLogitsWarper(settings["top_k"])(ids, logits)
        if "top_p" in settings:
            logits = TopPLogitsWarper(settings["top_p"])(ids, logits)
        return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]

    difference = errors(requests, answers, rescore)
    assert difference.max() <= 1e-4
    assert difference.mean() <= 1e-5


def test_the_policy_scores_what_the_engine_reports(pair: Any) -> None:
    policy, engine, _ = pair
    requests = asked()
    answers = engine.generate(requests)
    scores = policy.logprobs(rows_of(requests, answers))

    def slice_of(row: int, tokens: torch.Tensor) -> torch.Tensor:
        start = len(requests[row].prompt_token_ids)
        return scores[row, start : start + len(tokens)]

    difference = errors(requests, answers, slice_of)
    assert difference.max() <= 1e-4
    assert difference.mean() <= 1e-5


def test_seeded_requests_do_not_depend_on_batch_and_order(pair: Any) -> None:
    _, engine, _ = pair
    requests = asked(prompts=PROMPTS * 3)
    together = engine.generate(requests)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = engine.generate([requests[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place].token_ids == together[i].token_ids
        alone = engine.generate([requests[i]])[0]
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)


def test_frequencies_follow_the_model(pair: Any) -> None:
    _, engine, reference = pair
    n = 5000
    prompt = (3, 60, 12)
    answers = engine.generate(asked(1, [prompt] * n))
    with torch.no_grad():
        p = sampling_logprobs(reference(torch.tensor([prompt])).logits[0, -1:])[0].double().exp()
    counts = Counter(a.token_ids[0] for a in answers)
    observed = torch.tensor([counts[token] for token in range(VOCAB)], dtype=torch.float64)
    live = n * p > 5
    chi2 = ((observed - n * p)[live] ** 2 / (n * p)[live]).sum().item()
    freedom = int(live.sum())
    assert freedom > 10
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5


def test_stop_tokens_end_a_row_and_limits_are_per_row(pair: Any) -> None:
    _, engine, _ = pair
    whole = engine.generate(asked())
    limited = [
        replace(
            r, sampling=replace(r.sampling, max_new_tokens=3 + 4 * i, stop_token_ids=(whole[i].token_ids[5],))
        )
        for i, r in enumerate(asked())
    ]
    for i, answer in enumerate(engine.generate(limited)):
        expected = list(whole[i].token_ids[: 3 + 4 * i])
        stop = whole[i].token_ids[5]
        stops = stop in expected
        if stops:
            expected = expected[: expected.index(stop) + 1]
        assert answer.token_ids == tuple(expected)
        assert answer.stop_reason == ("stop" if stops else "length")


def test_weights_changed_by_training_are_visible_at_once(tmp_path: Path) -> None:
    """Before and after an update, engine and policy agree; in between, the answers change."""
    torch.manual_seed(1)
    MODELS["qwen3"]().save_pretrained(tmp_path / "m")

    def likelihood(logits: Any, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        places = torch.arange(batch.input_ids.shape[1])
        mask = (places > 0) & (places < batch.lengths[:, None])
        return -(logits.logprobs() * mask).sum() / 100, {}

    with MegatronPolicy(tmp_path / "m") as policy:
        engine = MegatronGeneration(policy.model, vocab_size=VOCAB, max_context=128)
        requests = asked(10)
        seen = []
        for version in range(3):
            answers = engine.generate(requests)
            batch = rows_of(requests, answers)
            scores = policy.logprobs(batch)
            for row, answer in enumerate(answers):
                start = len(requests[row].prompt_token_ids)
                expected = scores[row, start : start + len(answer.token_ids)].tolist()
                assert answer.logprobs == pytest.approx(expected, abs=1e-4)
                assert answer.weight_version == version
            seen.append(answers)
            policy.train(batch, likelihood, learning_rate=0.02)
            engine.update_weights((), version + 1)
        assert seen[0] != seen[1] != seen[2]
