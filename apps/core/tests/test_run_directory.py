from __future__ import annotations

import json

import pytest

from rl_app_core.config import ConfigError, GRPOConfig, load_config
from rl_app_core.loggers import JsonlLogger, Loggers, TensorBoardLogger
from rl_app_core.run_directory import RunDirectory, Summary, append_record, write_file

CONFIG = load_config(None, ["model.tiny={}", "data.train.dataset_name=basic_arithmetic"], model=GRPOConfig)


def test_a_run_directory_holds_the_resolved_configuration(tmp_path):
    RunDirectory.create(tmp_path / "run", CONFIG, "grpo")
    directory, config = RunDirectory.open(tmp_path / "run", GRPOConfig)
    assert config == CONFIG
    assert directory.logs.is_dir()


def test_a_directory_with_something_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match=f"grpo resume {tmp_path}"):
        RunDirectory.create(tmp_path, CONFIG, "grpo")
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_without_a_name_every_run_gets_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {RunDirectory.create(None, CONFIG, "grpo").path for _ in range(3)}
    assert len(paths) == 3
    assert all(path.parent.name == "runs" for path in paths)


def test_what_is_not_a_run_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        RunDirectory.open(tmp_path, GRPOConfig)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "summary.json"
    write_file(target, "old")
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_file(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_summary_holds_exactly_its_fields(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", CONFIG, "grpo")
    directory.write_summary(Summary(30, 0.1, 0.9, 60.0, 1000, 10.0, 20.0, 700.0, 0))
    assert set(json.loads(directory.summary_file.read_text())) == {
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


def test_a_resume_forgets_what_it_will_do_again_and_counts_the_time_before(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", CONFIG, "grpo")
    for step in range(6):
        append_record(directory.metrics_file, {"step": step, "seconds": 10.0 * step})
        append_record(directory.rollouts_file, {"step": step})
    with directory.metrics_file.open("a") as file:
        file.write('{"step": 6, "sec')
    assert directory.elapsed_until(4) == 40.0
    directory.forget_after(4)
    for file in (directory.metrics_file, directory.rollouts_file):
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_m2_the_step_is_the_callers_however_often_it_logs(tmp_path):
    loggers = Loggers([JsonlLogger(tmp_path / "metrics.jsonl", lambda: 1.5)])
    for index in range(5):
        loggers.log(7, {f"metric_{index}": 1.0})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [7] * 5
    assert [record["seconds"] for record in records] == [1.5] * 5


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = Loggers([TensorBoardLogger(tmp_path)])
    loggers.log(9, {"reward": 0.75})
    loggers.close()
    # Resumed before step 9: what the file of the first part says after that is not so any more.
    history = [{"step": 2, "seconds": 1.0, "reward": 0.125}]
    loggers = Loggers([TensorBoardLogger(tmp_path, history)])
    loggers.log(3, {"reward": 0.25})
    loggers.log(4, {"reward": 0.5})
    loggers.close()
    loggers.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (2, 0.125),
        (3, 0.25),
        (4, 0.5),
    ]


def test_a_metric_that_is_not_finite_is_seen_and_one_that_is_no_number_is_refused(tmp_path):
    loggers = Loggers([JsonlLogger(tmp_path / "metrics.jsonl", lambda: 0.0)])
    loggers.log(1, {"loss": float("nan"), "reward": 1.0})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["loss/not_finite"] == 1.0
    assert "loss" not in record
    with pytest.raises(TypeError, match="'weights' is a list"):
        loggers.log(2, {"weights": [3]})
