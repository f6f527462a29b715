"""The command line: exit codes, one clear line for an error, and nothing started or written."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rl_app_core.config import ConfigError, GRPOConfig, SingleControllerConfig, load_config
from rl_app_core.config.asynchronous import Async
from rl_app_core.preflight import prepare
from rl_app_core.run_directory import RunDirectory, Summary, append_record
from rl_app_single_controller.cli import app
from rl_app_single_controller.plan import check_settings
from rl_app_single_controller.recipes import RECIPES


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, words)

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["async.max_stalenes=2"], "async.max_stalenes is not a setting; did you mean async.max_staleness?"),
        (["max_staleness=2"], "did you mean async.max_staleness?"),
        (["async_.max_staleness=2"], "did you mean async.max_staleness?"),
        (["async.stragler_policy=wait"], "did you mean async.straggler_policy?"),
        (["async.zzz=1"], "`single-controller show-config` lists every key"),
        (["async=3"], "async=3: "),
        (["async.max_staleness=-1"], "async.max_staleness=-1: "),
        (["async.max_staleness=1.5"], "async.max_staleness=1.5: "),
        (["async.max_staleness=true"], "async.max_staleness: true is a flag"),
        (["async.sampler=windowd"], "async.sampler='windowd' does not exist; did you mean windowed?"),
        (["async.sampler=nowhere:X"], "async.sampler: there is no module 'nowhere'"),
        (
            ["async.sampler_options={share: 1}"],
            "async: sampler_options are of a class of your own, not of in_order; leave them out",
        ),
        (["async.window_steps=0.5"], "async.window_steps=0.5: "),
        (["async.max_running_groups=0"], "async.max_running_groups=0: "),
        (["async.straggler_policy=drop"], "'wait', 'replace' or 'shrink'"),
        (["async.straggler_timeout_s=.nan"], "async.straggler_timeout_s=nan: "),
        (["async.min_batch_fraction=0"], "async.min_batch_fraction=0: "),
        (["async.min_batch_fraction=1.1"], "async.min_batch_fraction=1.1: "),
        (["async.max_row_replays=-1"], "async.max_row_replays=-1: "),
        (["async.infra_retries=-1"], "async.infra_retries=-1: "),
        (["async.data_retries=x"], "async.data_retries='x': "),
        (["async.retry_delay_s=.inf"], "async.retry_delay_s=inf: "),
        (["async.retry_delay_s=60"], "async: retry_delay_max_s=30 is below retry_delay_s=60; raise it"),
        (["async.rollout_timeout_s=0"], "async.rollout_timeout_s=0: "),
        (
            ["async.stall_timeout_s=1800"],
            "async: stall_timeout_s=1800 must exceed rollout_timeout_s=1800: a single rollout may take that",
        ),
        (["async.save_groups_every_s=0"], "async.save_groups_every_s=0: "),
        (["async.grace_s=0"], "async.grace_s=0: "),
        (
            ["algorithm.dynamic_sampling=true"],
            "use algorithm.filter_zero_spread, or the command grpo",
        ),
        (["algorithm.importance_min=0.5", "algorithm.importance_max=0.1"], "algorithm: importance"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "validate"])
def test_what_cannot_be_used_is_exit_code_2_and_one_line(verb, words, told, command, tmp_path):
    done = command(verb, *words)
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_word_is_refused_without_importing_what_only_a_run_needs(tmp_path):
    code = (
        "import sys\n"
        "from rl_app_single_controller.cli import app\n"
        "try:\n    app(['run', 'async.max_stalenes=2'])\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        "print(int(code), sorted({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "2 []"
    assert done.stderr.startswith("error: async.max_stalenes is not a setting; did you mean")


def test_show_config_prints_every_key_of_the_section_and_is_yaml_that_run_accepts(command, tmp_path):
    done = command("show-config", "async.max_staleness=4", "async.save_groups_every_s=null")
    assert (done.exit_code, done.stderr) == (0, "")
    shown = yaml.safe_load(done.stdout)["async"]
    assert list(shown) == list(Async.model_fields), "under the names that words go by"
    assert (shown["max_staleness"], shown["save_groups_every_s"]) == (4, None)
    (tmp_path / "mine.yaml").write_text(done.stdout)
    assert command("validate", "-c", "mine.yaml").exit_code == 0
    assert command("show-config", "-c", "mine.yaml").stdout == done.stdout, "to the letter"
    again = command("show-config", "-c", "mine.yaml", "async.max_staleness=2")
    assert yaml.safe_load(again.stdout)["async"]["max_staleness"] == 2


def test_the_section_may_be_left_out_and_keys_of_it_too(command, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "model: {tiny: {}}\ndata: {train: {dataset_name: basic_arithmetic}}\nasync: {max_staleness: 0}\n"
    )
    shown = yaml.safe_load(command("show-config", "-c", "mine.yaml").stdout)["async"]
    assert shown == {**Async().model_dump(), "max_staleness": 0}


def test_validate_says_what_it_found_and_writes_nothing(command, tmp_path):
    done = command("validate")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: cpu.yaml, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", RECIPES.names)
def test_every_shipped_recipe_loads_and_validates(name, monkeypatch):
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    config = load_config(RECIPES.find(name), model=SingleControllerConfig)
    check_settings(config)
    if config.generation.engine != "megatron":
        pytest.importorskip("vllm", reason="it runs in the environment that has vLLM")
    prepared = prepare(config)
    assert prepared.problems.train
    assert prepared.problems.held_out


def test_resume_and_the_words_for_it_are_those_of_this_command(command, tmp_path):
    assert command("resume", "nowhere").exit_code == 2
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("x")
    done = command("run", "-o", "run")
    assert done.exit_code == 2
    assert "single-controller resume run" in done.stderr


def test_a_run_that_is_done_is_not_done_again(command, tmp_path):
    config = load_config(RECIPES.find("cpu"), ["algorithm.steps=3"], model=SingleControllerConfig)
    directory = RunDirectory.create(tmp_path / "run", config, "single-controller")
    append_record(directory.metrics_file, {"step": 3, "seconds": 1.0})
    directory.write_summary(Summary(3, 0.1, 0.9, 1.0, 10, 0.1, 0.1, 1.0, 0))
    done = command("resume", "run")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "run is done: 3 steps" in done.stdout


def test_a_run_of_this_command_is_none_of_a_synchronous_one(tmp_path):
    """Which would go on without the controller's state."""
    config = load_config(RECIPES.find("cpu"), model=SingleControllerConfig)
    RunDirectory.create(tmp_path / "run", config, "single-controller")
    with pytest.raises(ConfigError, match="async"):
        RunDirectory.open(tmp_path / "run", GRPOConfig)
    assert RunDirectory.open(tmp_path / "run", SingleControllerConfig)[1] == config
