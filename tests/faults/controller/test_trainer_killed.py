"""A run whose policy's process is killed ends with an exit code of its own, and a resume loses nothing.

RL_FAULTS_N says how often; at least 10 times.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rl_app_core.exit_codes import ExitCode
from tests.faults.controller.harness import END_S, Harness

N = max(int(os.environ.get("RL_FAULTS_N", "10")), 10)
STEPS_PER_LIFE = 15
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * N + 600)]


def test_a_trainer_that_is_killed_ends_the_run_by_name_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Harness(tmp_path, steps=STEPS_PER_LIFE * N, seed=2, words=("async.sampler=ready_first",)) as harness:
        for _ in range(N):
            life = harness.start()
            harness.until_it_trains(life)
            time.sleep(harness.random.random() * 0.8)
            worker = life.worker()
            assert worker is not None, life.said()
            worker.kill()
            harness.fired["trainer"] += 1
            code = life.wait(END_S)
            assert code == ExitCode.POLICY, f"exit code {code}:\n{life.said()[-2000:]}"
            harness.buried(life)
        harness.finish()
        harness.check(max_staleness=1)
        assert harness.fired["trainer"] == N
        with capsys.disabled():
            print(f"\n{harness.told()}")
