"""The command: what it refuses, before anything starts or is written."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from rl_app_core.config import DistillationConfig, GRPOConfig, load_config
from rl_app_distillation.cli import app
from rl_app_distillation.recipes import RECIPES, TEACHERS


@pytest.fixture
def distill(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, words)

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["teacher.recipe=null"], "give exactly one of recipe"),
        (["teacher.model=here"], "got recipe and model"),
        (["teacher.recipe=cpuu"], "teacher.recipe: recipe 'cpuu'"),
        (["teacher.recipe=null", "teacher.run=nowhere"], "is not a run directory"),
        (["teacher.recipe=null", "teacher.model=nowhere"], "teacher.model"),
        (["teachers={calculator: {model: nowhere}}"], "teachers.calculator.model"),
        (["algorithm.top_k=0"], "algorithm.top_k=0"),
        (["algorithm.topk=3"], "did you mean algorithm.top_k?"),
        (["algorithm.divergence=both"], "'forward', 'reverse' or 'mixed'"),
        (["algorithm.normalization=constant"], "'token' or 'sequence'"),
        (["teacher.engine=vllm", "generation.temperature=0.7"], "scores at temperature 1"),
        (["rewards.overlong_buffer=4"], "rewards.overlong_buffer is not a setting"),
        (["algorithm.prompts_per_step=99999"], "distinct training problems"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2_and_one_line(words, told, distill, tmp_path):
    done = distill("run", *words)
    assert done.exit_code == 2
    assert told in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize("name", RECIPES.names)
def test_every_shipped_recipe_validates(name, distill):
    done = distill("validate", "-c", name)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"ok: {name}.yaml")


def test_teachers_are_recipes_of_the_grpo_job_that_start_where_the_student_does():
    student = load_config(RECIPES.find("cpu"), model=DistillationConfig)
    for name in TEACHERS.names:
        teacher = load_config(TEACHERS.find(name), model=GRPOConfig)
        assert (teacher.model, teacher.data, teacher.warm_start) == (
            student.model,
            student.data,
            student.warm_start,
        )


def test_show_config_names_the_command_in_what_it_says(distill):
    shown = distill("show-config")
    assert shown.exit_code == 0
    assert "divergence: reverse" in shown.output
    assert "`distill show-config` lists every key" in distill("run", "zzzzzz=1").output
