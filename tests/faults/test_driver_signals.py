"""What a user's Ctrl-C, and what a killed driver, leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 240
WORDS = [
    "warm_start.steps=0",
    "algorithm.steps=100000",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=2",
    "data.held_out.size=8",
    "checkpointing.every=100",
]


# One step of this takes minutes.
LONG_STEP = ["algorithm.prompts_per_step=128", "algorithm.group_size=16", "generation.max_new_tokens=900"]


@pytest.fixture
def driver(tmp_path, request):
    """A run that would go on for hours, in a session of its own, once it has begun with its steps."""
    more = getattr(request, "param", [])
    directory = tmp_path / "run"
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_app_grpo", "run", "-o", str(directory), *WORDS, *more],
            stdout=output,
            stderr=output,
            env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
            start_new_session=True,
        )
    try:
        if more:
            _wait_until_inside_a_step(process, directory, tmp_path / "output")
        else:
            _wait_for(lambda: _steps(directory) >= 3, START_S, process, tmp_path / "output")
        yield process, directory
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def _wait_until_inside_a_step(process: subprocess.Popen[bytes], directory: Path, output: Path) -> None:
    """Until nothing but the first step's rollouts can keep the worker busy.

    The start is logged before the first checkpoint is published; a request between the two, or right
    after them, meets a safe point at once.
    """
    first = directory / "checkpoints" / "step_0"
    _wait_for(first.is_dir, START_S, process, output)
    worker = next(member for member in _family(process) if "ColocatedWorker" in " ".join(member.cmdline()))
    spent = worker.cpu_times().user
    _wait_for(lambda: worker.cpu_times().user - spent >= 3, START_S, process, output)


def _steps(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return file.read_text().count("\n") - 1 if file.exists() else -1


def _wait_for(condition, seconds: float, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended by itself:\n{output.read_text()}"
        assert time.monotonic() < deadline, f"nothing after {seconds} s:\n{output.read_text()}"
        time.sleep(0.2)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


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


def test_a_killed_driver_leaves_no_process(driver):
    process, _ = driver
    family = _family(process)
    assert any("ColocatedWorker" in " ".join(member.cmdline()) for member in family), "no worker was seen"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    deadline = time.monotonic() + 10
    while (left := _alive(family)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_request_to_stop_ends_cleanly_and_can_be_resumed(driver, number, code, tmp_path):
    process, directory = driver
    family = _family(process)
    # As a terminal does it: to every process of the foreground group.
    os.killpg(process.pid, number)
    assert process.wait(60) == code
    assert _alive(family) == []
    said = (tmp_path / "output").read_text()
    assert f"continue with: grpo resume {directory}" in said
    assert "Traceback" not in said

    done = _steps(directory)
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace("steps: 100000", f"steps: {done + 2}"))
    resumed = subprocess.run(
        [sys.executable, "-m", "rl_app_grpo", "resume", str(directory)],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed    after step {done}" in resumed.stdout
    assert _steps(directory) == done + 2


@pytest.mark.parametrize("driver", [LONG_STEP], indirect=True)
def test_a_second_request_does_not_wait_for_the_step(driver, tmp_path):
    process, directory = driver
    family = _family(process)
    output = tmp_path / "output"
    process.send_signal(signal.SIGINT)
    _wait_for(lambda: "stopping at the next safe point" in output.read_text(), 30, process, output)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert _alive(family) == []
    assert f"stopped at once; continue with: grpo resume {directory}" in output.read_text()
