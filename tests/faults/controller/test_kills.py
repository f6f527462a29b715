"""A run whose controller or trainer is killed again and again trains each row once and leaves nothing.

RL_FAULTS_N says how often each is killed; 20 unless told otherwise, 100 by `./hatch run faults-all`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.controller.entry import POINTS
from tests.faults.controller.harness import END_S, START_S, Harness

N = max(int(os.environ.get("RL_FAULTS_N", "20")), 20)
# More than any life gets through before it ends.
STEPS_PER_LIFE = 15
pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(60 * N + 600)]


def report(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = sorted(harness.seconds_to_step)
    with capsys.disabled():
        print(
            f"\n{sum(harness.fired.values())} faults: {dict(harness.fired)}; first new step after a start: "
            f"median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s"
        )


def test_a_controller_that_is_killed_anywhere_trains_each_row_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = Harness(tmp_path, steps=STEPS_PER_LIFE * N, seed=1)
    for number in range(N):
        if number % 2:
            life = harness.start()
            harness.until_it_trains(life)
            time.sleep(harness.random.random() * 0.8)
            harness.kill(life, "at a random time")
            continue
        point = POINTS[(number // 2) % len(POINTS)]
        life = harness.start(f"{point}@{harness.random.randint(1, 3)}")
        assert life.wait(START_S) == -signal.SIGKILL, f"{point} did not come:\n{life.said()[-2000:]}"
        harness.fired[point] += 1
        harness.buried(life)
    harness.finish()
    harness.check(max_staleness=1)
    assert sum(harness.fired.values()) == N
    assert set(harness.fired) == {"at a random time", *POINTS}
    report(harness, capsys)


def test_a_trainer_that_is_killed_ends_the_run_by_name_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = Harness(tmp_path, steps=STEPS_PER_LIFE * N, seed=2, words=("async.sampler=ready_first",))
    for _ in range(N):
        life = harness.start()
        harness.until_it_trains(life)
        time.sleep(harness.random.random() * 0.8)
        worker = life.worker()
        assert worker is not None, life.said()
        worker.kill()
        harness.fired["trainer"] += 1
        code = life.wait(END_S)
        assert code == 10, f"exit code {code}:\n{life.said()[-2000:]}"
        harness.buried(life)
    harness.finish()
    harness.check(max_staleness=1)
    assert harness.fired["trainer"] == N
    report(harness, capsys)
