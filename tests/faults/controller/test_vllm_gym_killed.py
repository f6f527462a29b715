"""Servers of a real NeMo Gym that are killed while they play: Gym is started again and no row is lost.

RL_FAULTS_N says how often; at least twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from rl_gym_bridge.supervision.processes import RUN_ID_VARIABLE
from tests.faults.controller.harness import END_S, START_S, Harness, Life

N = max(int(os.environ.get("RL_FAULTS_N", "2")), 2)
RECIPE = Path(__file__).resolve().parents[3] / "apps" / "grpo" / "recipes" / "cpu-gym.yaml"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 * N + 900)]


def servers(life: Life, run: Path) -> list[psutil.Process]:
    """Processes of all the run's Gyms that still run: each has inherited its name."""
    names = {folder.name.removeprefix("gym-") for folder in run.glob("logs/gym*/gym-*")}
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            of_gym = process.environ().get(RUN_ID_VARIABLE) in names
            if of_gym and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    life.family += found
    return found


def verifiers(life: Life, run: Path) -> list[psutil.Process]:
    """Those that judge answers."""
    found: list[psutil.Process] = []
    for process in servers(life, run):
        with contextlib.suppress(psutil.Error):
            if process.cwd().endswith("resources_servers/equivalence_rule"):
                found.append(process)
    return found


def test_a_gym_that_is_killed_is_started_again_and_each_row_is_trained_once(
    tmp_path: Path, gym_python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RL_GYM_PYTHON", gym_python)
    gym = yaml.safe_load(RECIPE.read_text())
    fields = gym["data"]["train"]["fields"]
    words = (
        *("generation.engine=vllm", "generation.vllm.kv_cache_bytes=67108864", "cluster.threads=1"),
        *(
            "environment.gym="
            + yaml.safe_dump(gym["environment"]["gym"], default_flow_style=True, width=10**6),
        ),
        f"data.train.fields={yaml.safe_dump(fields, default_flow_style=True).strip()}",
        *("data.held_out.size=4", "evaluation.every=100", "checkpointing.every=20", "async.gym_restarts=20"),
        *("async.retry_delay_max_s=5", "async.infra_retries=60", "cluster.start_timeout_s=400"),
    )
    with Harness(tmp_path, steps=1_000_000, seed=5, words=words) as harness:
        life = harness.start()
        harness.until_it_trains(life)
        for _ in range(N):
            before = len(harness.lines)
            time.sleep(harness.random.random() * 2.0)
            alive = verifiers(life, harness.run)
            assert alive, "no server of Gym was found"
            harness.random.choice(alive).kill()
            harness.fired["server of Gym"] += 1
            deadline = time.monotonic() + START_S
            # What runs ahead is trained first; then it takes a new Gym.
            while (
                life.said().count("is started again") < sum(harness.fired.values())
                or len(harness.lines) < before + 4
            ):
                assert life.process.poll() is None, life.said()[-3000:]
                assert time.monotonic() < deadline, f"no new step:\n{life.said()[-3000:]}"
                time.sleep(0.1)
        servers(life, harness.run)
        life.process.send_signal(signal.SIGTERM)
        assert life.wait(2 * END_S) == 128 + signal.SIGTERM, life.said()[-3000:]
        harness.buried(life)
        assert servers(life, harness.run) == []
        # Gym 0.4 drops the versions of tokens.
        harness.check(max_staleness=1, steps=len(harness.history()), versions=False)
        assert harness.fired["server of Gym"] == N
        with capsys.disabled():
            print(f"\n{harness.told()}; {len(harness.history())} steps trained")
