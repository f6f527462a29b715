"""Jobs that are not the default one: turns with a tool, a model from a directory, problems from a file."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROLLOUTS_PER_STEP = 32
SMALL = (
    "algorithm.steps=3",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
    "algorithm.warmup_steps=0",
    "data.held_out.size=16",
    "data.train.size=2000",
    "logging.tensorboard=false",
    f"logging.rollouts_per_step={ROLLOUTS_PER_STEP}",
)
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "grpo.md"


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _rows_from(path: Path) -> tuple[str, ...]:
    return ("data.train.dataset_name=null", "data.train.options={}", f"data.train.path={path}")


def _check_rollouts(run: Run) -> None:
    """Everything kept adds up: mask, log-probabilities, versions, and the tokens that the loss counted."""
    for step in range(1, 4):
        rollouts = [rollout for rollout in run.rollouts if rollout["step"] == step]
        assert len(rollouts) == ROLLOUTS_PER_STEP
        for rollout in rollouts:
            mask = rollout["token_mask"]
            assert len(rollout["token_ids"]) == len(rollout["logprobs"]) == len(mask)
            assert sum(mask) == len(rollout["weight_versions"])
            assert mask[0] == 0
            pairs = zip(mask, rollout["logprobs"], strict=True)
            assert all(value <= 1e-4 if sampled else value == 0.0 for sampled, value in pairs)
        assert run.metrics[step]["tokens"] == sum(sum(rollout["token_mask"]) for rollout in rollouts)


@pytest.fixture(scope="module")
def tool_run(grpo, tmp_path_factory) -> Run:
    """Sums of digits, with a policy that was only just shown how to call the calculator."""
    directory = tmp_path_factory.mktemp("tools") / "run"
    digits = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, operators: ['+'], "
    words = [
        *SMALL,
        f"data.train.options={digits}allow_parentheses: false, allow_negation: false}}",
        "warm_start.steps=90",
        "warm_start.batch_size=32",
        "warm_start.phases=[{until_step: 90, share: 1.0}]",
    ]
    return grpo("run", "-c", "cpu-tools", "-o", directory, *words, directory=directory)


def test_what_the_tool_says_is_in_the_sequence_and_not_in_the_mask(tool_run):
    tokenizer = AutoTokenizer.from_pretrained(tool_run.directory / "model")
    response = r"<\|im_start\|>user\n<tool_response>\n(?:\d+|Error: [^<]+.*?)\n</tool_response><\|im_end\|>\n"
    told = re.compile(rf"\n(?:{response})+<\|im_start\|>assistant\n", re.DOTALL)
    _check_rollouts(tool_run)
    with_tool = [rollout for rollout in tool_run.rollouts if rollout["metrics"]["turns"] == 2]
    assert len(with_tool) >= 10
    for rollout in with_tool:
        assert rollout["metrics"]["tool_calls"] >= 1
        pieces = [
            (sampled, tokenizer.decode([token for token, _ in piece]))
            for sampled, piece in itertools.groupby(
                zip(rollout["token_ids"], rollout["token_mask"], strict=True), key=lambda pair: pair[1]
            )
        ]
        assert [sampled for sampled, _ in pieces] == [0, 1, 0, 1]
        prompt, call, tool, answer = (text for _, text in pieces)
        assert prompt.endswith("<|im_start|>assistant\n")
        assert "<tool_call>" in call
        assert call.endswith("<|im_end|>")
        assert told.fullmatch(tool), tool
        assert answer.removesuffix("<|im_end|>") == rollout["text"]
    for rollout in tool_run.rollouts:
        if rollout["metrics"]["turns"] == 1:
            assert [flag for flag, _ in itertools.groupby(rollout["token_mask"])] == [0, 1]


def test_the_loss_counts_the_sampled_tokens_of_both_turns_and_no_others(tool_run):
    trained = 0
    for step in range(1, 4):
        metrics = tool_run.metrics[step]
        moving = [r for r in tool_run.rollouts if r["step"] == step and r["advantage"] != 0]
        if not moving:
            assert metrics["updates"] == 0
            continue
        trained += 1
        assert metrics["valid_samples"] == len(moving)
        assert metrics["valid_tokens"] == sum(sum(rollout["token_mask"]) for rollout in moving)
        assert metrics["logprob_gap_mean"] <= 1e-4
        assert abs(metrics["first_ratio_min"] - 1) <= 1e-4
        assert abs(metrics["first_ratio_max"] - 1) <= 1e-4
    assert trained, "no step had rewards that differ; the test sees nothing then"


@pytest.fixture(scope="module")
def llama(parity_model, tmp_path_factory) -> Path:
    """A Llama with random weights that says 0 or 1 or ends its answer more often than anything else."""
    shape = functools.partial(
        LlamaConfig,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=None,
    )
    return parity_model(
        tmp_path_factory.mktemp("llama") / "model", lambda **sizes: LlamaForCausalLM(shape(**sizes))
    )


@pytest.fixture(scope="module")
def llama_run(grpo, llama, documented_rows, parity_rows, tmp_path_factory) -> Run:
    """Every part of the algorithm that the shipped recipes leave off, at once, on problems from a file.

    Some of them are the documentation's, which such a model never answers rightly.
    """
    directory = tmp_path_factory.mktemp("parts") / "run"
    rows = [*map(json.loads, documented_rows.read_text().splitlines()), *parity_rows(60)]
    words = [
        *SMALL,
        "model.tiny=null",
        f"model.path={llama}",
        *_rows_from(_write_rows(directory.parent / "rows.jsonl", rows)),
        "environment.name=final_number",
        "warm_start.steps=0",
        "algorithm.learning_rate=3.0e-4",
        "algorithm.kl_coefficient=0.05",
        "algorithm.updates_per_step=2",
        "algorithm.entropy_coefficient=0.01",
        "algorithm.normalization=sequence",
        "algorithm.advantage=rloo",
        "generation.temperature=0.7",
        "generation.max_new_tokens=8",
        "checkpointing.every=1",
        "checkpointing.keep=9",
    ]
    return grpo("run", "-c", "cpu", "-o", directory, *words, directory=directory)


def test_a_llama_trains_with_everything_switched_on(llama_run):
    """D5: engine and policy agree at a temperature other than 1, before every first update."""
    _check_rollouts(llama_run)
    for step in range(1, 4):
        metrics = llama_run.metrics[step]
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["updates"] == 2
        assert metrics["zero_spread_groups"] < metrics["groups"]
        assert 0 < metrics["reward_mean"] < 1
        assert metrics["logprob_gap_mean"] <= 1e-4
        assert metrics["logprob_gap_max"] <= 1e-3
        assert abs(metrics["first_ratio_min"] - 1) <= 1e-4
        assert abs(metrics["first_ratio_max"] - 1) <= 1e-4
        # Of the second update, after the weights moved: still few steps from the reference.
        assert metrics["ratio_max"] - metrics["ratio_min"] > 1e-3
        assert 0 < metrics["kl"] < 1
        assert metrics["entropy"] > 0


def test_the_llamas_log_probabilities_are_those_of_transformers_at_this_temperature(llama, llama_run):
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for rollout in [rollout for rollout in llama_run.rollouts if rollout["step"] == 1]:
        ids = torch.tensor([rollout["token_ids"]])
        with torch.no_grad():
            scores = (model(ids).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = scores.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(rollout["token_mask"][1:]).bool()
        assert (expected - torch.tensor(rollout["logprobs"][1:]))[mask].abs().max() <= 1e-4


def test_a_rollouts_advantage_is_its_reward_over_the_mean_of_the_others(llama_run):
    groups: dict[str, list[dict[str, Any]]] = {}
    for rollout in llama_run.rollouts:
        groups.setdefault(rollout["group_id"], []).append(rollout)
    assert len(groups) == 24
    for group in groups.values():
        total = sum(rollout["reward"] for rollout in group)
        for rollout in group:
            others = (total - rollout["reward"]) / (len(group) - 1)
            assert rollout["advantage"] == pytest.approx(rollout["reward"] - others, abs=1e-9)


def test_a_resume_trains_the_same_rows_to_the_same_losses_and_kl_from_where_the_run_started(
    llama_run, grpo, tmp_path
):
    directory = tmp_path / "run"
    shutil.copytree(llama_run.directory, directory)
    # As if it had been killed after the first step.
    (directory / "summary.json").unlink()
    for step in (2, 3):
        shutil.rmtree(directory / "checkpoints" / f"step_{step}")
    run = grpo("resume", directory, directory=directory)
    assert "resumed    after step 1" in run.process.stdout
    assert sorted(run.metrics) == [0, 1, 2, 3]
    exact = ("loss", "kl", "entropy", "grad_norm", "reward_mean", "tokens", "ratio_max", "logprob_gap_max")
    for step in (2, 3):
        for name in exact:
            assert run.metrics[step][name] == llama_run.metrics[step][name], (step, name)
    then, now = (
        [(r["step"], r["rollout_id"], r["token_ids"], r["reward"]) for r in source.rollouts]
        for source in (llama_run, run)
    )
    assert then == now
    for name in ("held_out_after", "tokens"):
        assert run.summary[name] == llama_run.summary[name]
    assert run.summary["seconds"] > llama_run.metrics[1]["seconds"]


@pytest.fixture(scope="module")
def documented_rows(tmp_path_factory) -> Path:
    """The documentation's row, asked about other countries too."""
    section = DOCUMENTATION.read_text().partition("## Your own problems")[2]
    line = re.search(r"```json\n(.+?)\n```", section)
    assert line is not None
    capitals = {"Italy": "Rome", "Spain": "Madrid", "Greece": "Athens", "Norway": "Oslo", "Peru": "Lima"}
    names = [
        "Austria",
        "Belgium",
        "Chad",
        "Cuba",
        "Egypt",
        "Fiji",
        "Ghana",
        "India",
        "Iran",
        "Japan",
        "Kenya",
    ]
    names += ["Kenya", "Laos", "Mali", "Nepal", "Oman", "Qatar", "Togo", "Turkey", "Yemen", "Zambia"]
    rows = [line[1]]
    rows += [line[1].replace("France", land).replace("Paris", city) for land, city in capitals.items()]
    rows += [line[1].replace("France", land).replace("Paris", land) for land in names]
    return _write_rows(tmp_path_factory.mktemp("documented") / "rows.jsonl", list(map(json.loads, rows)))


def test_problems_of_ones_own(llama, llama_run):
    """The documentation's rows are played, each in the environment that it names, beside those of another."""
    assert llama_run.summary["steps"] == 3
    assert llama_run.process.stderr == ""
    assert {rollout["agent"] for rollout in llama_run.rollouts} == {"exact_answer", "final_number"}
    tokenizer = AutoTokenizer.from_pretrained(llama)
    asked = {"exact_answer": "What is the capital of ", "final_number": "Is "}
    for rollout in llama_run.rollouts:
        text = tokenizer.decode(rollout["token_ids"])
        assert text.startswith(f"<|im_start|>user\n{asked[rollout['agent']]}"), text


def test_the_documented_command_for_ones_own_problems_is_accepted(grpo, llama, documented_rows):
    section = DOCUMENTATION.read_text().partition("## Your own problems")[2]
    command = re.search(r"grpo run (.+data\.train\.path=rows\.jsonl)", section)
    assert command is not None
    words = command[1].replace("DIR", str(llama)).replace("rows.jsonl", str(documented_rows)).split()
    checked = grpo("validate", *words, directory=documented_rows.parent)
    assert checked.process.stdout.startswith("ok: smollm.yaml, ")
