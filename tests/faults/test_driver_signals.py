"""What a user's Ctrl-C, and what a killed driver, leave behind.

One run meets them all, one after the other: each end but the last is followed by a resume.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 240
WORDS = [
    "warm_start.steps=0",
    "algorithm.steps=100000",
    "algorithm.prompts_per_step=4",
    # Its answers are all wrong for a while.
    "algorithm.max_skipped_steps=1000000",
    "data.train.size=200",
    "data.held_out.size=8",
    "checkpointing.every=100",
    "logging.tensorboard=false",
]
# One step of this takes minutes …
LONG_STEP = {"algorithm.group_size": 512, "generation.max_new_tokens": 900}
# … and one of this a moment.
SHORT_STEP = {"algorithm.group_size": 2, "generation.max_new_tokens": 32}


@dataclass
class Driver:
    """A ``grpo`` command in a session of its own, and the run directory that it works on."""

    process: subprocess.Popen[bytes]
    directory: Path
    output: Path

    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, condition: Callable[[], object], seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the run ended by itself:\n{self.said()}"
            assert time.monotonic() < deadline, f"nothing after {seconds} s:\n{self.said()}"
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        assert any("ColocatedWorker" in " ".join(member.cmdline()) for member in found), "no worker was seen"
        return found


@dataclass(frozen=True)
class Ended:
    """How a driver ended: its exit code, what it left, what it said, and the steps that were done."""

    directory: Path
    code: int
    left: list[str]
    said: str
    steps: int


def _steps(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return file.read_text().count("\n") - 1 if file.exists() else -1


def _alive(family: list[psutil.Process]) -> list[str]:
    """Members that still run; a zombie waits for a parent that is not ours."""
    found = []
    for member in family:
        try:
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{member.pid} {' '.join(member.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """Start a ``grpo`` command that would go on for hours: ``grpo(RUN_DIR, *words)``."""
    started: list[subprocess.Popen[bytes]] = []

    def start(directory: Path, *words: str) -> Driver:
        file = tmp_path_factory.mktemp("driver") / "output"
        with file.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rl_app_grpo", *words],
                stdout=output,
                stderr=output,
                env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
                start_new_session=True,
            )
        started.append(process)
        return Driver(process, directory, file)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def _resumed(grpo, before: Ended) -> Driver:
    """Resume what has ended, and wait until it has done two steps more."""
    driver = grpo(before.directory, "resume", str(before.directory))
    driver.wait_for(lambda: _steps(before.directory) >= before.steps + 2)
    assert f"resumed    after step {before.steps}" in driver.said()
    return driver


def _asked_to_stop(driver: Driver, number: int) -> Ended:
    family = driver.family()
    if number == signal.SIGINT:
        # As a terminal does it: to every process of the foreground group.
        os.killpg(driver.process.pid, number)
    else:
        # As `kill` and schedulers do it: Ray's own processes, which share the group, would obey it as well.
        driver.process.send_signal(number)
    code = driver.process.wait(60)
    return Ended(driver.directory, code, _alive(family), driver.said(), _steps(driver.directory))


@pytest.fixture(scope="module")
def stopped_within_a_step(grpo, tmp_path_factory) -> Ended:
    directory = tmp_path_factory.mktemp("signals") / "run"
    long = [f"{key}={value}" for key, value in LONG_STEP.items()]
    driver = grpo(directory, "run", "-o", str(directory), *WORDS, *long)
    _wait_until_inside_a_step(driver)
    family = driver.family()
    driver.process.send_signal(signal.SIGINT)
    driver.wait_for(lambda: "stopping at the next safe point" in driver.said(), 30)
    driver.process.send_signal(signal.SIGINT)
    code = driver.process.wait(60)
    ended = Ended(directory, code, _alive(family), driver.said(), _steps(directory))
    config = yaml.safe_load((directory / "config.yaml").read_text())
    for key, value in SHORT_STEP.items():
        section, _, name = key.partition(".")
        config[section][name] = value
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return ended


def _wait_until_inside_a_step(driver: Driver) -> None:
    """Until nothing but the first step's rollouts can keep the worker busy.

    The start is logged before the first checkpoint is published; a request between the two, or right
    after them, meets a safe point at once.
    """
    driver.wait_for((driver.directory / "checkpoints" / "step_0").is_dir)
    worker = next(member for member in driver.family() if "ColocatedWorker" in " ".join(member.cmdline()))
    spent = worker.cpu_times().user
    driver.wait_for(lambda: worker.cpu_times().user - spent >= 3)


@pytest.fixture(scope="module")
def interrupted(grpo, stopped_within_a_step) -> Ended:
    return _asked_to_stop(_resumed(grpo, stopped_within_a_step), signal.SIGINT)


@pytest.fixture(scope="module")
def terminated(grpo, interrupted) -> Ended:
    return _asked_to_stop(_resumed(grpo, interrupted), signal.SIGTERM)


def test_a_second_request_does_not_wait_for_the_step(stopped_within_a_step):
    ended = stopped_within_a_step
    assert (ended.code, ended.left, ended.steps) == (130, [], 0), ended.said
    assert f"stopped at once; continue with: grpo resume {ended.directory}" in ended.said


@pytest.mark.parametrize(("how", "code"), [("interrupted", 130), ("terminated", 143)])
def test_a_request_to_stop_ends_cleanly(how, code, request):
    """The fixtures resume what the request before it ended: so each of them can be resumed."""
    ended = request.getfixturevalue(how)
    assert (ended.code, ended.left) == (code, []), ended.said
    assert f"continue with: grpo resume {ended.directory}" in ended.said
    assert "Traceback" not in ended.said


def test_a_killed_driver_leaves_no_process(grpo, terminated):
    driver = _resumed(grpo, terminated)
    family = driver.family()
    driver.process.send_signal(signal.SIGKILL)
    driver.process.wait(10)
    deadline = time.monotonic() + 10
    while (left := _alive(family)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_sigterm_while_it_starts_ends_it_with_a_word_and_without_a_trace(grpo, tmp_path):
    directory = tmp_path / "run"
    driver = grpo(directory, "run", "-o", str(directory), *WORDS)
    driver.wait_for(lambda: "starting   the" in driver.said())
    driver.process.send_signal(signal.SIGTERM)
    assert driver.process.wait(60) == 128 + signal.SIGTERM
    assert f"interrupted; continue with: grpo resume {directory}" in driver.said()
    assert "SIGTERM received" not in driver.said()
