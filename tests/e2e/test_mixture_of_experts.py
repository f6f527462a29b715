"""A job whose policy is a mixture of experts, from a directory to an export that transformers reads."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

if TYPE_CHECKING:
    from conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def mixture(parity_model, tmp_path_factory) -> Path:
    """Two layers of four experts with random weights, which say 0, 1 or nothing more often than else."""
    shape = functools.partial(
        Qwen3MoeConfig,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    return parity_model(
        tmp_path_factory.mktemp("mixture") / "model", lambda **sizes: Qwen3MoeForCausalLM(shape(**sizes))
    )


@pytest.fixture(scope="module")
def trained(grpo, mixture, parity_rows, tmp_path_factory) -> Run:
    directory = tmp_path_factory.mktemp("experts") / "run"
    problems = directory.parent / "rows.jsonl"
    problems.write_text("".join(f"{json.dumps(row)}\n" for row in parity_rows(40)))
    words = [
        "model.tiny=null",
        f"model.path={mixture}",
        "data.train.dataset_name=null",
        "data.train.options={}",
        f"data.train.path={problems}",
        "data.held_out.size=8",
        "environment.name=final_number",
        "warm_start.steps=0",
        "algorithm.steps=2",
        "algorithm.prompts_per_step=8",
        "algorithm.group_size=4",
        "algorithm.warmup_steps=0",
        "algorithm.learning_rate=1.0e-3",
        "generation.max_new_tokens=8",
        "checkpointing.every=1",
        "logging.tensorboard=false",
    ]
    return grpo("run", "-c", "cpu", "-o", directory, *words, directory=directory)


def test_engine_and_policy_agree_about_every_token_while_the_experts_learn(trained):
    assert [trained.metrics[step]["updates"] for step in (1, 2)] == [1, 1]
    for step in (1, 2):
        metrics = trained.metrics[step]
        assert metrics["logprob_gap_max"] <= 1e-4
        assert abs(metrics["first_ratio_min"] - 1) <= 1e-4
        assert abs(metrics["first_ratio_max"] - 1) <= 1e-4


def test_the_export_is_the_trained_mixture_and_transformers_reads_it(trained, mixture, grpo, tmp_path):
    from rl_algorithms.loops.persist import POLICY_FOLDER
    from rl_policy_megatron import MegatronPolicy

    target = tmp_path / "model"
    grpo("export-hf", trained.directory, target, directory=trained.directory)
    exported, initial = (load_file(path / "model.safetensors") for path in (target, mixture))
    assert exported.keys() == initial.keys()
    for part in ("mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.3.down_proj"):
        name = f"model.layers.1.{part}.weight"
        assert not torch.equal(exported[name], initial[name]), name
    assert (target / "config.json").read_bytes() == (mixture / "config.json").read_bytes()

    model = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    with MegatronPolicy(mixture) as policy:
        policy.load(trained.directory / "checkpoints" / "step_2" / POLICY_FOLDER)
        found = policy.logprobs(_Rows(ids))
    assert (found[:, 1:] - expected).abs().max() <= 1e-4


class _Rows:
    """The batch that a policy scores, all rows of one length."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.input_ids = ids
        self.lengths = torch.full((len(ids),), ids.size(1))

    def select(self, rows: list[int]) -> _Rows:
        return _Rows(self.input_ids[rows])
