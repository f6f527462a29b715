"""On-policy distillation as a user runs it: teachers of every source, and a student that learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

WARM = 6
SMALL = {
    "warm_start.steps": WARM,
    "warm_start.batch_size": 8,
    "warm_start.phases": [{"until_step": WARM, "share": 0.9}],
    "data.held_out.size": 8,
    "algorithm.steps": 2,
    "algorithm.prompts_per_step": 4,
    "evaluation.every": 1,
    "checkpointing.every": 1,
}
FOLDER = Path(__file__).resolve().parents[2] / "apps" / "distillation" / "recipes"


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def test_a_student_learns_from_a_run_of_the_grpo_job(distill, learned, tmp_path):
    """The student is the model that the teacher was before reinforcement learning."""
    directory = tmp_path / "run"
    run = distill(
        *("run", "-o", directory, "teacher.recipe=null", f"teacher.run={learned.directory}"),
        *("algorithm.steps=15", "evaluation.every=15"),
        directory=directory,
    )
    summary = run.summary
    assert (summary["steps"], summary["seed"]) == (15, 0)
    assert summary["held_out_before"] == learned.summary["held_out_before"] <= 0.3
    assert summary["held_out_after"] >= learned.summary["held_out_after"] - 0.1
    assert run.metrics[15]["divergence"] < 0.2 * run.metrics[1]["divergence"]
    assert all(0.9 < run.metrics[step]["teacher_mass"] <= 1 + 1e-5 for step in range(1, 16))
    assert run.rollouts[0]["advantage"] == 1.0


@pytest.fixture(scope="module")
def trained(distill, tmp_path_factory):
    """A run that trains its teacher first, both in a few steps."""
    folder = tmp_path_factory.mktemp("distillation")
    recipe = yaml.safe_load((FOLDER / "teachers" / "cpu.yaml").read_text())
    for key, value in {**SMALL, "algorithm.group_size": 4, "algorithm.entropy_coefficient": 0.01}.items():
        *parents, leaf = key.split(".")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    (folder / "teacher.yaml").write_text(yaml.safe_dump(recipe))
    directory = folder / "run"
    return distill(
        *("run", "-o", directory, f"teacher.recipe={folder / 'teacher.yaml'}", *words(SMALL)),
        directory=directory,
    )


def test_a_teacher_is_trained_in_the_same_run(trained):
    teacher = trained.directory / "teacher"
    assert (teacher / "summary.json").is_file(), "the teacher's folder is a run directory of its own"
    exported = load_file(teacher / "exported" / "model.safetensors")
    start = load_file(trained.directory / "model" / "model.safetensors")
    assert exported.keys() == start.keys()
    assert any(not torch.equal(exported[name], start[name]) for name in start)
    assert "teacher    held-out accuracy" in trained.process.stdout
    assert trained.summary["steps"] == 2


def test_a_resume_keeps_the_teacher_and_goes_on_to_the_bit(distill, trained, tmp_path):
    directory = tmp_path / "resumed"
    shutil.copytree(trained.directory, directory)
    (directory / "summary.json").unlink()
    shutil.rmtree(directory / "checkpoints" / "step_2")
    run = distill("resume", directory, directory=directory)
    assert "resumed    after step 1" in run.process.stdout
    assert "is trained by" not in run.process.stdout
    for name in ("loss", "divergence", "grad_norm", "held_out/accuracy"):
        assert run.metrics[2][name] == trained.metrics[2][name]
    assert "is done: 2 steps" in distill("resume", directory, directory=directory).process.stdout


def test_a_resume_goes_on_with_a_teacher_that_was_being_trained(distill, trained, tmp_path):
    """As if it had been killed after the teacher's first step, when the student had nothing yet."""
    directory = tmp_path / "run"
    shutil.copytree(trained.directory, directory)
    teacher = directory / "teacher"
    for folder in (directory / "checkpoints", teacher / "exported", teacher / "checkpoints" / "step_2"):
        shutil.rmtree(folder)
    for file in ("summary.json", "metrics.jsonl", "rollouts.jsonl", "teacher/summary.json"):
        (directory / file).unlink()
    run = distill("resume", directory, directory=directory)
    assert "resumed    after step 1" in run.process.stdout, "the teacher went on where it was"
    same = load_file(teacher / "exported" / "model.safetensors")
    was = load_file(trained.directory / "teacher" / "exported" / "model.safetensors")
    assert all(torch.equal(same[name], was[name]) for name in was)
    for name in ("loss", "divergence", "held_out/accuracy"):
        assert run.metrics[2][name] == trained.metrics[2][name]


def test_teachers_by_task_and_the_teachers_opinion_as_advantage(distill, trained, tmp_path):
    model = trained.directory / "teacher" / "exported"
    directory = tmp_path / "run"
    run = distill(
        *("run", "-o", directory, "teacher.recipe=null", f"teacher.model={trained.directory / 'model'}"),
        f"teachers={{exact_answer: {{model: {model}}}}}",
        *("algorithm.objective=opd", "algorithm.steps=1"),
        *words({key: value for key, value in SMALL.items() if key != "algorithm.steps"}),
        directory=directory,
    )
    advantages = [rollout["advantage"] for rollout in run.rollouts]
    assert any(advantage not in (0.0, 1.0) for advantage in advantages)
    assert run.metrics[1]["first_ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_a_teacher_with_other_tokens_is_refused(distill, trained, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained.directory / "teacher" / "exported", other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<think>", "<thunk>"))
    directory = tmp_path / "run"
    run = distill(
        *("run", "-o", directory, "teacher.recipe=null", f"teacher.model={other}", *words(SMALL)),
        directory=directory,
        expect=2,
    )
    assert "have other vocabularies" in run.process.stderr
