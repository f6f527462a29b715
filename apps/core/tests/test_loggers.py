"""What is logged: numbers, under their own names, and nothing that skips a step in silence."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_app_core.loggers import JsonlLogger, Loggers
from rl_app_core.run_directory import RunDirectory


class Kept:
    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Any) -> None:
        self.entries.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def test_m4_a_mapping_for_a_metric_is_flattened() -> None:
    kept = Kept()
    Loggers([kept]).log(3, {"w": {0: 3, 1: 4, "deep": {"er": 5.0}}, "loss": 1.0})  # type: ignore[dict-item]
    assert kept.entries == [(3, {"w/0": 3, "w/1": 4, "w/deep/er": 5.0, "loss": 1.0})]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_says_so_and_leaves_no_gap(odd: float) -> None:
    kept = Kept()
    Loggers([kept]).log(1, {"loss": odd})
    assert kept.entries == [(1, {"loss/not_finite": 1.0})]


@pytest.mark.parametrize("value", ["3", None, True, [1.0]])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    kept = Kept()
    with pytest.raises(TypeError, match="metric 'a/b' is a"):
        Loggers([kept]).log(1, {"a": {"b": value}})  # type: ignore[dict-item]
    assert not kept.entries


def test_every_destination_is_told_and_closed_once() -> None:
    first, second = Kept(), Kept()
    loggers = Loggers([first, second])
    loggers.log(1, {"loss": 0.5})
    loggers.close()
    loggers.close()
    assert first.entries == second.entries == [(1, {"loss": 0.5})]
    assert (first.closed, second.closed) == (1, 1)


def elsewhere(loggers: Loggers, step: int, metrics: dict[str, float]) -> None:
    """From a thread of its own, to its end."""
    failed: list[BaseException] = []

    def log() -> None:
        try:
            loggers.log(step, metrics)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=log)
    thread.start()
    thread.join()
    assert not failed


def test_m1_what_a_second_thread_says_of_a_step_that_was_told_is_kept_as_well(tmp_path: Path) -> None:
    """No step is ever closed: what comes later is a further line, and takes the place of none."""
    directory = RunDirectory(tmp_path)
    times = iter((1.0, 2.0, 3.0))
    loggers = Loggers.for_run(directory, lambda: next(times), tensorboard=False)
    loggers.log(5, {"loss": 0.5, "shared": 1.0})
    elsewhere(loggers, 5, {"tokens": 7.0, "shared": 2.0})
    loggers.log(6, {"loss": 0.25})
    assert directory.records() == [
        {"step": 5, "seconds": 1.0, "loss": 0.5, "shared": 1.0},
        {"step": 5, "seconds": 2.0, "tokens": 7.0, "shared": 2.0},
        {"step": 6, "seconds": 3.0, "loss": 0.25},
    ]


def test_m1_a_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    """Without close: a process that is killed afterwards has lost nothing of what it logged."""
    file = tmp_path / "metrics.jsonl"
    loggers = Loggers([JsonlLogger(file, lambda: 0.0)])
    for count in range(1, 4):
        elsewhere(loggers, 5, {"loss": float(count)})
        assert [json.loads(line)["loss"] for line in file.read_text().splitlines()][-1] == count
        assert file.read_text().count("\n") == count


def test_m1_threads_that_log_at_once_lose_no_line_and_mix_none(tmp_path: Path) -> None:
    """Lines that are longer than the buffer of a file, too."""
    file = tmp_path / "metrics.jsonl"
    loggers = Loggers([JsonlLogger(file, lambda: 0.0)])
    wide = {f"a metric with a long name, number {number}": float(number) for number in range(400)}
    together = threading.Barrier(4)

    def log(thread: int) -> None:
        together.wait(10.0)
        for step in range(20):
            loggers.log(step, {"thread": float(thread), **wide})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log, range(4)))
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((entry["step"], entry["thread"]) for entry in found) == [
        (step, float(thread)) for step in range(20) for thread in range(4)
    ]
    assert all(entry.items() >= wide.items() for entry in found)
