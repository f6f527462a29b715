"""The default job as a user runs it: it learns, says little, and leaves what it promises."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


def test_it_learns_to_think(learned):
    summary = learned.summary
    assert summary["steps"] == 15
    assert summary["held_out_before"] <= 0.25
    assert summary["held_out_after"] >= 0.75
    assert learned.metrics[15]["held_out/thinks"] > learned.metrics[0]["held_out/thinks"] + 0.5


def test_the_summary_holds_what_is_promised(learned):
    assert set(learned.summary) == {
        "steps",
        "held_out_before",
        "held_out_after",
        "seconds",
        "tokens",
        "seconds_generation",
        "seconds_training",
        "peak_memory_mb",
        "seed",
        "generation_tokens_per_second",
        "seconds_refit",
        "logprob_gap_mean",
        "logprob_gap_max",
    }
    metrics = learned.metrics
    assert learned.summary["tokens"] == sum(metrics[step]["tokens"] for step in range(1, 16))
    assert learned.summary["held_out_before"] == metrics[0]["held_out/accuracy"]
    assert learned.summary["held_out_after"] == metrics[15]["held_out/accuracy"]
    assert learned.summary["seconds"] >= learned.summary["seconds_generation"]
    assert learned.summary["seconds_refit"] == 0, "engine and policy share their weights"
    assert learned.summary["generation_tokens_per_second"] == pytest.approx(
        learned.summary["tokens"] / sum(metrics[step]["engine_seconds"] for step in range(1, 16)), rel=1e-3
    )
    assert sorted(metrics) == list(range(16))


def test_it_is_on_policy(learned):
    for step in range(1, 16):
        metrics = learned.metrics[step]
        assert abs(metrics["first_ratio_min"] - 1) <= 1e-4
        assert abs(metrics["first_ratio_max"] - 1) <= 1e-4
        assert metrics["logprob_gap_mean"] <= 1e-4
        assert metrics["logprob_gap_max"] <= 1e-3
        assert abs(metrics["engine_ratio_mean"] - 1) <= 1e-4
        assert "refit_seconds" not in metrics


def test_it_says_little_and_nothing_for_its_libraries(learned):
    shown = learned.process.stdout.splitlines()
    assert len(shown) <= 40
    assert learned.process.stderr == ""
    foreign = re.compile(r"warning|\bray\b|torch|raylet|deprecat|\x1b", re.IGNORECASE)
    assert not [line for line in shown if foreign.search(line)]
    assert any("before     held-out accuracy" in line for line in shown)
    assert any("after      held-out accuracy" in line for line in shown)


def test_the_rollouts_that_were_kept_are_whole(learned):
    rollouts = learned.rollouts
    assert {rollout["step"] for rollout in rollouts} == set(range(1, 16))
    for rollout in rollouts:
        sampled = sum(rollout["token_mask"])
        assert len(rollout["token_ids"]) == len(rollout["token_mask"]) == len(rollout["logprobs"])
        assert len(rollout["weight_versions"]) == sampled
    versions = {rollout["step"]: set(rollout["weight_versions"]) for rollout in rollouts}
    assert all(len(found) == 1 for found in versions.values())
    assert {step: min(found) - min(versions[1]) for step, found in versions.items()} == {
        step: step - 1 for step in range(1, 16)
    }


def test_the_export_is_the_trained_model_and_transformers_agrees(learned, grpo, tmp_path):
    """Exported weights, transformers' logits and the engine's own log-probabilities belong together."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "model"
    grpo("export-hf", learned.directory, target, directory=learned.directory)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    trained = load_file(target / "model.safetensors")
    initial = load_file(learned.directory / "model" / "model.safetensors")
    assert trained.keys() == initial.keys()
    assert not torch.equal(trained["model.norm.weight"], initial["model.norm.weight"])

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Calculate 27 + 58."}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).rpartition("</think>")[2].strip() == "85"


def test_the_checkpoint_of_a_step_scores_its_rollouts_as_the_engine_did(learned):
    """The rollouts of step 11 were sampled from checkpoint 10: policy and transformers both say so."""
    from transformers import AutoModelForCausalLM

    from rl_algorithms.loops.persist import POLICY_FOLDER
    from rl_policy_megatron import MegatronPolicy

    policy = MegatronPolicy(learned.directory / "model")
    try:
        policy.load(learned.directory / "checkpoints" / "step_10" / POLICY_FOLDER)
        weights = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    finally:
        policy.shutdown()
    model = AutoModelForCausalLM.from_pretrained(learned.directory / "model", dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    for rollout in [rollout for rollout in learned.rollouts if rollout["step"] == 11]:
        ids = torch.tensor([rollout["token_ids"]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(rollout["token_mask"][1:]).bool()
        reported = torch.tensor(rollout["logprobs"][1:])
        assert (expected - reported)[mask].abs().max() <= 1e-4
