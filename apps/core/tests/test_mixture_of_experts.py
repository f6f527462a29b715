"""The engine that shares the policy's model decodes a mixture of experts as the policy scores it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_generation.megatron import MegatronGeneration
from rl_generation.protocol import GenerationRequest, SamplingParams
from rl_policy_megatron import MegatronPolicy

VOCABULARY, CONTEXT = 61, 64
PROMPTS = [(3, 9, 27), (3, 9, 27), (5,), (8, 1, 40, 2, 33)]


@dataclass
class Rows:
    input_ids: torch.Tensor
    lengths: torch.Tensor

    def select(self, rows):
        return Rows(self.input_ids[rows], self.lengths[rows])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Three layers with experts around one without."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        initializer_range=0.2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def _requests():
    return [GenerationRequest(p, SamplingParams(12, temperature=1.0, seed=i)) for i, p in enumerate(PROMPTS)]


def _scored(policy, completions):
    """Of each completion, the policy's log-probabilities of its tokens."""
    rows = [[*p, *c.token_ids] for p, c in zip(PROMPTS, completions, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
    scores = policy.logprobs(Rows(ids, lengths))
    return [
        scores[i, len(p) : len(row)].tolist() for i, (p, row) in enumerate(zip(PROMPTS, rows, strict=True))
    ]


@pytest.mark.parametrize("path", ["layers", "model"])
def test_the_policys_experts_decode_as_they_score_before_and_after_an_update(directory, path):
    with MegatronPolicy(directory) as policy:
        engine = MegatronGeneration(
            policy.model, vocab_size=policy.vocab_size, max_context=CONTEXT, path=path, weight_version=0
        )
        first = engine.generate(_requests())
        for completion, scores in zip(first, _scored(policy, first), strict=True):
            assert len(scores) == 12
            assert completion.logprobs == pytest.approx(scores, abs=1e-5)
        ids = torch.tensor([[*PROMPTS[0], *first[0].token_ids]])
        rows = Rows(ids, torch.tensor([ids.size(1)]))
        policy.train(rows, lambda logits, _: (-logits.logprobs().mean(), {}), learning_rate=1e-2)
        engine.update_weights([], 1)
        second = engine.generate(_requests())
        for completion, scores in zip(second, _scored(policy, second), strict=True):
            assert completion.logprobs == pytest.approx(scores, abs=1e-5)
        assert [c.token_ids for c in second] != [c.token_ids for c in first]
        alone = [engine.generate([request])[0].token_ids for request in _requests()]
        assert alone == [completion.token_ids for completion in second]
        engine.shutdown(1.0)
