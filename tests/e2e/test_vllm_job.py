"""A small job with real vLLM through the command line: refits, numbers, two killed replicas, a resume."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, WARM_START = 4, 8
WORDS = [
    *("run", "-c", "cpu-vllm", f"algorithm.steps={STEPS}", "algorithm.prompts_per_step=8"),
    *("algorithm.group_size=4", f"warm_start.steps={WARM_START}", "warm_start.batch_size=8"),
    f"warm_start.phases=[{{until_step: {WARM_START}, share: 0.9}}]",
    *("data.held_out.size=8", "evaluation.every=2", "checkpointing.every=1", "checkpointing.keep=9"),
    # So few steps earn no reward; an entropy term changes the weights all the same.
    "algorithm.entropy_coefficient=0.01",
    *("generation.server.enabled=true", "logging.rollouts_per_step=99", "cluster.start_timeout_s=400"),
]
DEADLINE_S = 540


def everything_below(process: psutil.Process) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        yield from process.children(recursive=True)


def actors(driver: psutil.Process, name: str) -> list[psutil.Process]:
    """Those of a class, by the title that Ray gives them; an engine's own process has inherited it."""
    found: dict[int, psutil.Process] = {}
    for member in everything_below(driver):
        with contextlib.suppress(psutil.Error):
            if re.match(rf"ray::{name}\b", " ".join(member.cmdline())):
                found[member.pid] = member
    return [member for member in found.values() if member.ppid() not in found]


def logged(directory: Path, step: int) -> bool:
    file = directory / "metrics.jsonl"
    return file.exists() and f'"step": {step},' in file.read_text()


@pytest.fixture(scope="module")
def survived(make_run, tmp_path_factory):
    """The run, after the second step of which both replicas were killed; and what it had started."""
    directory = tmp_path_factory.mktemp("vllm") / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_app_grpo", *WORDS, "-o", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
    )
    seen: set[psutil.Process] = set()
    killed: list[int] = []
    deadline = time.monotonic() + DEADLINE_S
    try:
        driver = psutil.Process(process.pid)
        while process.poll() is None and time.monotonic() < deadline:
            seen |= set(everything_below(driver))
            if not killed and logged(directory, 2):
                for replica in actors(driver, "VllmCpuWorker"):
                    replica.send_signal(signal.SIGKILL)
                    killed.append(replica.pid)
            time.sleep(0.2)
    finally:
        process.kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, f"{out}\n{err}"
    assert len(killed) == 2
    done = subprocess.CompletedProcess(WORDS, process.returncode, out, err)
    return make_run(directory, done), seen


@pytest.fixture(scope="module")
def run(survived):
    return survived[0]


def test_every_step_says_how_fast_it_sampled_and_how_long_it_took_to_hand_weights_over(run):
    assert sorted(run.metrics) == list(range(STEPS + 1))
    assert run.metrics[0]["refit_seconds"] > 0
    for step in range(1, STEPS + 1):
        metrics = run.metrics[step]
        assert metrics["generation_tokens_per_second"] > 0
        # That of step 1 was handed over before it, to be measured.
        assert ("refit_seconds" in metrics) == (step > 1)


def test_it_is_on_policy(run):
    for step in range(1, STEPS + 1):
        metrics = run.metrics[step]
        assert metrics["logprob_gap_mean"] <= 1e-4
        assert metrics["logprob_gap_max"] <= 2e-3
        assert 1 - 2e-3 <= metrics["engine_ratio_min"] <= metrics["engine_ratio_max"] <= 1 + 2.1e-3
        assert abs(metrics["engine_ratio_mean"] - 1) <= 1e-4


def test_no_token_was_sampled_from_older_weights_than_those_of_its_step(run):
    """Killed replicas come back with the initial weights, and serve nothing before they have the new ones."""
    versions = {step: set() for step in range(1, STEPS + 1)}
    for rollout in run.rollouts:
        versions[rollout["step"]] |= set(rollout["weight_versions"])
    assert versions == {step: {WARM_START + step - 1} for step in range(1, STEPS + 1)}


def test_killed_replicas_come_back_and_nothing_is_lost(run):
    assert run.metrics[2]["replica_restarts"] == 0
    assert run.metrics[STEPS]["replica_restarts"] >= 2
    assert run.metrics[STEPS]["replicas_serving"] >= 1
    for step in range(1, STEPS + 1):
        assert run.metrics[step]["failures_infra"] + run.metrics[step]["failures_data"] == 0
        assert run.metrics[step]["samples_valid"] == 32


def test_the_summary_and_the_screen_have_the_engines_numbers(run):
    summary, shown = run.summary, run.process.stdout
    assert summary["steps"] == STEPS
    assert summary["generation_tokens_per_second"] > 0
    assert summary["seconds_refit"] == pytest.approx(
        sum(record.get("refit_seconds", 0) for record in run.metrics.values()), abs=1e-2
    )
    assert summary["logprob_gap_max"] == max(run.metrics[s]["logprob_gap_max"] for s in range(1, STEPS + 1))
    assert len(re.findall(r"^serving    http://127\.0\.0\.1:\d+/v1$", shown, re.MULTILINE)) == 2
    assert re.search(r"^grpo +4/4 .*tokens/s \S+  refit s \S+", shown, re.MULTILINE)
    assert re.search(r"^engine     .* tokens/s, .* s of refits; ", shown, re.MULTILINE)
    assert len(shown.splitlines()) <= 40
    assert "raylet" not in shown, "Ray's own words about the killed replicas"
    assert run.process.stderr == ""


def test_nothing_that_it_started_is_left(survived):
    _, seen = survived
    assert len(seen) >= 5
    _, alive = psutil.wait_procs(seen, timeout=10)
    assert [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_resume_hands_the_checkpoints_weights_over_before_its_first_rollout(run, grpo, tmp_path):
    """It samples the very tokens of the run that was not interrupted, from the same version."""
    directory = tmp_path / "run"
    shutil.copytree(run.directory, directory)
    (directory / "summary.json").unlink()
    for step in (2, 3, 4):
        shutil.rmtree(directory / "checkpoints" / f"step_{step}")
    # One more step by one replica is enough: who samples a request makes no difference.
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["algorithm"]["steps"] = 2
    config["generation"]["vllm"]["replicas"] = 1
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    resumed = grpo("resume", directory, directory=directory)
    assert "resumed    after step 1" in resumed.process.stdout
    again = [rollout for rollout in resumed.rollouts if rollout["step"] == 2]
    before = [rollout for rollout in run.rollouts if rollout["step"] == 2]
    assert [r["token_ids"] for r in again] == [r["token_ids"] for r in before]
    assert {version for rollout in again for version in rollout["weight_versions"]} == {WARM_START + 1}
    assert resumed.metrics[2]["logprob_gap_max"] <= 2e-3
