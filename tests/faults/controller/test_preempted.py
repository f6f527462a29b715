"""SIGTERM at any time: the run ends within its grace, with a valid checkpoint of the last finished step.

RL_FAULTS_N says how often; at least 5 times.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rl_algorithms.checkpointing import CheckpointStore
from tests.faults.controller.harness import END_S, Harness

N = max(int(os.environ.get("RL_FAULTS_N", "5")), 5)
GRACE_S = 30.0
STEPS_PER_LIFE = 40
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * N + 600)]


def test_a_run_that_is_preempted_saves_what_it_has_finished_and_ends_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"async.grace_s={GRACE_S}", "checkpointing.every=1000000", "async.max_staleness=2")
    with Harness(tmp_path, steps=STEPS_PER_LIFE * N, seed=3, words=words) as harness:
        seconds: list[float] = []
        for number in range(N):
            life = harness.start()
            if number % 5 == 4:
                # Somewhere in the start; the first time there is nothing to resume yet.
                time.sleep(1.0 + harness.random.random() * 8.0)
            else:
                harness.until_it_trains(life)
                time.sleep(harness.random.random())
            life.look()
            asked = time.monotonic()
            life.process.send_signal(signal.SIGTERM)
            code = life.wait(END_S)
            seconds.append(time.monotonic() - asked)
            harness.fired["SIGTERM"] += 1
            harness.buried(life)
            # Before its first word nobody listens for signals yet.
            wanted = {128 + signal.SIGTERM} if life.said() else {128 + signal.SIGTERM, -signal.SIGTERM}
            assert code in wanted, f"exit code {code}:\n{life.said()[-2000:]}"
            assert seconds[-1] < GRACE_S, f"{seconds[-1]:.1f} s:\n{life.said()[-2000:]}"
            newest = CheckpointStore(harness.run / "checkpoints").latest()
            finished = harness.history()
            if finished:
                assert newest is not None
                assert newest.step == len(finished), f"{life.said()[-2000:]}"
                logged = [
                    json.loads(line) for line in (harness.run / "metrics.jsonl").read_text().splitlines()
                ]
                assert max(record["step"] for record in logged) == newest.step
        harness.finish()
        harness.check(max_staleness=2)
        assert harness.fired["SIGTERM"] == N
        with capsys.disabled():
            print(f"\n{harness.told()}; ended within {max(seconds):.1f} s of SIGTERM")
