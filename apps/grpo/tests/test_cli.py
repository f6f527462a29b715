"""The command line: exit codes, one clear line for an error, and nothing started or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rl_app_core import engine_plan, gym_plan
from rl_app_core.config import ConfigError, GRPOConfig, load_config
from rl_app_core.config.sections import TinyModel
from rl_app_core.demonstrations import tokenizer_texts
from rl_app_core.preflight import prepare
from rl_app_core.run_directory import RunDirectory, Summary, append_record
from rl_app_core.tiny_model import write_tiny_model
from rl_app_grpo.cli import app
from rl_app_grpo.recipes import RECIPES
from rl_gym_bridge.interpreter import GymInterpreter

IMPORTANCE_BOUNDS_SWAPPED = [
    "algorithm.importance_correction=tis",
    "algorithm.importance_max=1",
    "algorithm.importance_min=2",
]
PICTURE = {"type": "input_image", "image_url": "picture.png"}


@pytest.fixture
def grpo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")

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
        (["run", "model.tiny=null", "model.path=nowhere"], "nowhere: there is no such directory"),
        (["run", "data.train.dataset_name=null", "data.train.path=none.jsonl"], "data.train.path"),
        (["run", "environment.name=calculater"], "did you mean 'calculator'?"),
        (["run", "warm_start.demonstrations=additions"], "did you mean addition?"),
        (["run", "-c", "smollm"], "model.path=DIR"),
        (["run", "algorithm.importance_min=0.5"], "algorithm: importance"),
        (["run", "algorithm.importance_correction=tis"], "importance_max"),
        (
            [
                "run",
                "algorithm.importance_correction=tis",
                "algorithm.importance_max=1",
                "algorithm.importance_min=2",
            ],
            "algorithm: ",
        ),
        (["run", "algorithm.clip_low=1.0"], "clip_low"),
        (["run", "algorithm.dual_clip=.inf"], "dual_clip"),
        (["run", "algorithm.leave_one_out=true", "algorithm.advantage=rloo"], "leave_one_out"),
        (["run", "rewards.overlong_buffer=99"], "overlong penalty needs"),
        (
            ["run", "rewards.overlong_buffer=4", "rewards.stop_properly_coefficient=0.5"],
            "stop_properly_coefficient",
        ),
        (["run", "generation.max_new_tokens=1024"], "leaves no room for a prompt"),
        (["run", "model.tiny.context=10"], "generation.max_new_tokens=32 leaves no room"),
        (["run", "algorithm.updates_per_step=33"], "exceeds algorithm.prompts_per_step=32"),
        (["run", "algorithm.prompts_per_step=99999"], "distinct training problems"),
        (
            ["run", 'data.train.options={min_terms: 2, max_terms: 2, operators: ["+", "-"]}'],
            "cannot demonstrate row",
        ),
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


def test_a_worker_without_an_environment_is_told_before_anything_starts(grpo, monkeypatch, tmp_path):
    monkeypatch.delenv("RL_ACTOR_ENVS_SYSTEM")
    monkeypatch.setenv("RL_ACTOR_ENVS_LOCK", str(tmp_path / "uv.lock"))
    (tmp_path / "uv.lock").write_text("")
    done = grpo("validate")
    assert done.exit_code == 2
    assert "RL_ACTOR_ENVS_SYSTEM=1" in done.stderr
    assert "ColocatedWorker" in done.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"config.json": b'{"model_type": "gemma"}'}, "gemma"),
        ({"config.json": b"{"}, "config.json"),
        ({"model.safetensors": b""}, "is not a safetensors file"),
        ({"model.safetensors": None}, "no *.safetensors"),
        ({"tokenizer.json": b"{}"}, "its tokenizer cannot be read"),
        ({"chat_template.jinja": b"{{ messages[0].content }}"}, "changes the assistant's text"),
    ],
)
def test_a_model_directory_that_cannot_be_run_is_refused(change, told, grpo, tmp_path):
    directory = tmp_path / "model"
    write_tiny_model(directory, TinyModel(layers=1), tokenizer_texts(), seed=0)
    words = ["validate", "-c", "smollm", f"model.path={directory}"]
    assert grpo(*words).exit_code == 0
    for name, content in change.items():
        (directory / name).unlink()
        if content is not None:
            (directory / name).write_bytes(content)
    done = grpo(*words)
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answer": None}, "answer"),
        ({"agent_ref": {"name": "exact_anser"}}, "did you mean 'exact_answer'"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
            "data",
        ),
    ],
)
def test_a_row_that_cannot_be_played_is_refused(change, told, grpo, tmp_path):
    rows = [
        {
            "responses_create_params": {"input": f"say {number}"},
            "agent_ref": {"name": "exact_answer"},
            "answer": str(number),
        }
        for number in range(100)
    ]
    rows[50] = {**rows[50], **change}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = grpo(
        "validate", "data.train.dataset_name=null", "data.train.path=rows.jsonl", "warm_start.steps=0"
    )
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_named_on_the_command_line_are_found_from_anywhere_later(grpo, tmp_path):
    shown = grpo("show-config", "data.train.dataset_name=null", "data.train.path=rows.jsonl").stdout
    assert yaml.safe_load(shown)["data"]["train"]["path"] == str(tmp_path / "rows.jsonl")


def test_a_run_that_another_process_works_on_is_left_alone(grpo, tmp_path):
    directory = RunDirectory.create(
        tmp_path / "run", load_config(RECIPES.find("cpu"), model=GRPOConfig), "grpo"
    )
    with directory.locked():
        done = grpo("resume", "run")
    assert done.exit_code == 2
    assert "another process is working on run" in done.stderr


def test_a_run_that_is_done_is_not_done_again(grpo, tmp_path):
    config = load_config(RECIPES.find("cpu"), ["algorithm.steps=3"], model=GRPOConfig)
    directory = RunDirectory.create(tmp_path / "run", config, "grpo")
    append_record(directory.metrics_file, {"step": 3, "seconds": 1.0})
    directory.write_summary(Summary(3, 0.1, 0.9, 1.0, 10, 0.1, 0.1, 1.0, 0))
    before = {path: path.read_bytes() for path in directory.path.glob("*.json*")}
    done = grpo("resume", "run")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "run is done: 3 steps; for more, raise algorithm.steps in run/config.yaml" in done.stdout
    assert {path: path.read_bytes() for path in directory.path.glob("*.json*")} == before


def test_settings_that_will_hardly_learn_are_warned_of_before_the_run(grpo):
    done = grpo("validate", "policy.peft={}")
    assert done.exit_code == 0
    assert done.stdout.startswith("warning: policy.peft trains adapters beside weights that stay")
    assert "warning" not in grpo("validate").stdout


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


@pytest.mark.parametrize("name", RECIPES.names)
def test_l5_every_shipped_recipe_loads_and_validates(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    # As in an environment with the engine, and beside one with Gym; what is said where there is none has
    # tests of its own.
    monkeypatch.setattr(engine_plan, "find_spec", lambda name: name)
    monkeypatch.setattr(engine_plan, "is_cpu_build", lambda: True)
    gym = GymInterpreter(Path(sys.executable), Path("gym"), "0.4.0", "3.12.1")
    monkeypatch.setattr(gym_plan, "find_gym_interpreter", lambda named: gym)
    words = []
    if name == "smollm":
        with pytest.raises(ConfigError, match=r"model\.path"):
            load_config(RECIPES.find(name), model=GRPOConfig)
        write_tiny_model(tmp_path / "model", TinyModel(layers=1), tokenizer_texts(), seed=0)
        words = [f"model.path={tmp_path / 'model'}"]
    prepared = prepare(load_config(RECIPES.find(name), words, model=GRPOConfig))
    assert prepared.problems.train
    assert prepared.problems.held_out


def test_the_recipes_are_those_that_the_documentation_names():
    assert {"cpu", "cpu-tools", "cpu-vllm", "cpu-gym", "smollm"} <= set(RECIPES.names)


def test_the_recipe_with_vllm_is_the_default_one_but_for_its_engine():
    default, vllm = (
        load_config(RECIPES.find(name), model=GRPOConfig).model_dump() for name in ("cpu", "cpu-vllm")
    )
    assert vllm["generation"].pop("engine") == "vllm"
    assert default["generation"].pop("engine") == "megatron"
    assert vllm["generation"].pop("vllm")["replicas"] == 2
    default["generation"].pop("vllm")
    assert vllm == default


def test_the_recipe_with_a_gym_learns_what_the_default_one_does():
    default, gym = (load_config(RECIPES.find(name), model=GRPOConfig) for name in ("cpu", "cpu-gym"))
    assert (gym.model, gym.warm_start) == (default.model, default.warm_start)
    assert gym.data.train.model_copy(update={"fields": {}}) == default.data.train
    assert gym.environment.gym is not None
    assert gym.serves
    assert not default.serves


def test_an_engine_that_is_not_here_is_told_with_the_command_that_has_it(grpo, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_plan, "find_spec", lambda name: None)
    done = grpo("run", "-c", "cpu-vllm")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: generation.engine=vllm: vLLM is not installed in this environment")
    assert "`./hatch run vllm:grpo run …`" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_gym_that_is_not_here_is_told_with_its_remedy(grpo, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_plan, "find_spec", lambda name: name)
    monkeypatch.setattr(engine_plan, "is_cpu_build", lambda: True)
    monkeypatch.delenv("RL_GYM_PYTHON", raising=False)
    done = grpo("run", "-c", "cpu-gym")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: environment.gym.python: ")
    assert "RL_GYM_PYTHON=GYM" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_tensorrt_llm_without_a_gpu_says_all_that_is_missing(grpo, tmp_path):
    done = grpo("run", "generation.engine=trtllm")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: generation.engine=trtllm: TensorRT-LLM cannot run on this machine")
    assert "the package tensorrt_llm" in done.stderr
    assert list(tmp_path.iterdir()) == []
