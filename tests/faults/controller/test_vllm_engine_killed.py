"""Replicas of vLLM that are killed while they sample or take weights: the run goes on and loses nothing.

RL_FAULTS_N says how often; at least 3 times.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.controller.harness import END_S, START_S, Harness, Life

N = max(int(os.environ.get("RL_FAULTS_N", "3")), 3)
WORDS = (
    *("generation.engine=vllm", "generation.vllm.replicas=2", "generation.vllm.kv_cache_bytes=67108864"),
    *("cluster.start_timeout_s=400", "cluster.threads=1", "evaluation.every=50", "checkpointing.every=20"),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 * N + 600)]


def replicas(life: Life) -> list[psutil.Process]:
    """The actors; what an engine starts has inherited their title."""
    life.look()
    found: dict[int, psutil.Process] = {}
    for member in life.family:
        try:
            if member.is_running() and re.match(r"ray::VllmCpuWorker\b", " ".join(member.cmdline())):
                found[member.pid] = member
        except psutil.Error:
            continue
    return [member for member in found.values() if member.ppid() not in found]


def newest(harness: Harness) -> dict[str, Any]:
    file = harness.run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1]) if lines else {}


def until_both_serve(harness: Harness, life: Life, restarts: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        record = newest(harness)
        if record.get("replicas_serving") == 2 and record.get("replica_restarts") == restarts:
            return
        assert life.process.poll() is None, life.said()[-3000:]
        assert time.monotonic() < deadline, f"not two replicas after {restarts} restarts: {record}"
        time.sleep(0.05)


def test_g3_a_replica_that_is_killed_is_started_again_and_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Harness(tmp_path, steps=1_000_000, seed=4, words=WORDS) as harness:
        life = harness.start()
        harness.until_it_trains(life)
        for kills in range(N):
            until_both_serve(harness, life, kills)
            time.sleep(harness.random.random())
            victim = harness.random.choice(replicas(life))
            children = victim.children(recursive=True)
            # The actor, or the engine's own process below it.
            target = harness.random.choice([victim, *children[:1]])
            harness.fired["actor" if target is victim else "engine process"] += 1
            target.kill()
        until_both_serve(harness, life, N)
        life.process.send_signal(signal.SIGTERM)
        assert life.wait(END_S) == 128 + signal.SIGTERM, life.said()[-3000:]
        harness.buried(life)
        harness.check(max_staleness=1, steps=len(harness.history()))
        assert sum(harness.fired.values()) == N
        with capsys.disabled():
            print(f"\n{harness.told()}; {len(harness.history())} steps trained")
