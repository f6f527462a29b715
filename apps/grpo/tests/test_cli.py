"""The command line: exit codes, one clear line for an error, and nothing started or written."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rl_app_core.config import ConfigError, load_config
from rl_app_core.preflight import prepare
from rl_app_grpo.cli import app
from rl_app_grpo.recipes import find_recipe, recipe_names


@pytest.fixture
def grpo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, words)

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["run", "algorithm.group_sise=4"],
            "did you mean algorithm.group_size?",
        ),
        (["run", "data.dataset_name=x"], "did you mean data.train.dataset_name?"),
        (["run", "algorithm.group_size=none"], "algorithm.group_size='none'"),
        (["run", "-c", "cpuu"], "did you mean cpu?"),
        (["run", "-c", "missing/recipe.yaml"], "neither a file nor a shipped recipe"),
        (["run", "model.tiny=null", "model.path=nowhere"], "model.path=nowhere: there is no such directory"),
        (["run", "data.train.dataset_name=null", "data.train.path=none.jsonl"], "data.train.path"),
        (["run", "environment.name=calculater"], "did you mean 'calculator'?"),
        (["run", "warm_start.demonstrations=additions"], "did you mean addition?"),
        (["run", "-c", "smollm"], "model.path=DIR"),
        (["resume", "nowhere"], "nowhere is not a run directory"),
        (["export-hf", "nowhere", "out"], "nowhere is not a run directory"),
        (["validate", "algorithm.steps=0"], "algorithm.steps=0"),
        (["show-config", "seed=x"], "seed='x'"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2_and_one_line(words, told, grpo, tmp_path):
    done = grpo(*words)
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_word_is_refused_without_importing_what_only_a_run_needs(tmp_path):
    code = (
        "import sys\n"
        "from rl_app_grpo.cli import app\n"
        "try:\n    app(['run', 'algorithm.group_sise=4'])\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        "print(int(code), sorted({'torch', 'ray', 'transformers', 'reasoning_gym'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "2 []"
    assert done.stderr.startswith("error: algorithm.group_sise is not a setting")


def test_an_occupied_run_directory_is_refused(grpo, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("x")
    done = grpo("run", "-o", "run")
    assert done.exit_code == 2
    assert "grpo resume run" in done.stderr


def test_show_config_is_yaml_that_run_accepts(grpo, tmp_path):
    shown = grpo("show-config", "seed=5").stdout
    (tmp_path / "mine.yaml").write_text(shown)
    assert yaml.safe_load(shown)["seed"] == 5
    assert grpo("validate", "-c", "mine.yaml").exit_code == 0


def test_validate_says_what_it_found_and_writes_nothing(grpo, tmp_path):
    done = grpo("validate")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: cpu.yaml, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", recipe_names())
def test_l5_every_shipped_recipe_loads_and_validates(name, tmp_path):
    words = []
    if name == "smollm":
        with pytest.raises(ConfigError, match=r"model\.path"):
            load_config(find_recipe(name))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (tmp_path / "model.safetensors").write_bytes(b"")
        (tmp_path / "tokenizer.json").write_text("{}")
        words = [f"model.path={tmp_path}"]
    prepared = prepare(load_config(find_recipe(name), words))
    assert prepared.problems.train
    assert prepared.problems.held_out


def test_the_recipes_are_the_three_that_the_documentation_names():
    assert {"cpu", "cpu-tools", "smollm"} <= set(recipe_names())
