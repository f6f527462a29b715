"""A run whose controller is killed again and again, anywhere, trains each row once and leaves nothing behind.

RL_FAULTS_N says how often; at least once at each named point, and four times at random.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.controller.entry import POINTS
from tests.faults.controller.harness import START_S, Harness

N = max(int(os.environ.get("RL_FAULTS_N", "0")), len(POINTS) + 4)
# More than any life gets through before it ends.
STEPS_PER_LIFE = 15
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * N + 600)]


def test_a_controller_that_is_killed_anywhere_trains_each_row_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Harness(tmp_path, steps=STEPS_PER_LIFE * N, seed=1) as harness:
        for number in range(N):
            if number >= len(POINTS) and (number % 2 or 2 * len(POINTS) > N):
                life = harness.start()
                harness.until_it_trains(life)
                time.sleep(harness.random.random() * 0.8)
                harness.kill(life, "at a random time")
                continue
            point = POINTS[number % len(POINTS)]
            life = harness.start(f"{point}@{harness.random.randint(1, 3)}")
            assert life.wait(START_S) == -signal.SIGKILL, f"{point} did not come:\n{life.said()[-2000:]}"
            harness.fired[point] += 1
            harness.buried(life)
        harness.finish()
        harness.check(max_staleness=1)
        assert sum(harness.fired.values()) == N
        assert set(harness.fired) == {"at a random time", *POINTS}
        with capsys.disabled():
            print(f"\n{harness.told()}")
