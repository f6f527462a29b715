"""A small job whose policy trains in two processes beside vLLM: refits, the numbers of one, nothing left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, WARM_START = 2, 4
WORDS = [
    *("run", "-c", "cpu-vllm", f"algorithm.steps={STEPS}", "algorithm.prompts_per_step=4"),
    *("algorithm.group_size=4", f"warm_start.steps={WARM_START}", "warm_start.batch_size=8"),
    f"warm_start.phases=[{{until_step: {WARM_START}, share: 0.9}}]",
    *("data.held_out.size=4", "evaluation.every=2", "checkpointing.every=1", "generation.vllm.replicas=1"),
    # So few steps earn no reward; an entropy term changes the weights all the same.
    *("algorithm.entropy_coefficient=0.01", "logging.rollouts_per_step=99", "cluster.start_timeout_s=400"),
]
PARALLEL = ["policy.parallel.data=2", "policy.packing=true", "policy.micro_batch_tokens=256"]
DEADLINE_S = 400


@pytest.fixture(scope="module")
def parallel(make_run, tmp_path_factory):
    """The run, and every process that it was seen to have started, by its title."""
    directory = tmp_path_factory.mktemp("parallel") / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_app_grpo", *WORDS, *PARALLEL, "-o", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
    )
    seen: dict[psutil.Process, str] = {}
    deadline = time.monotonic() + DEADLINE_S
    try:
        driver = psutil.Process(process.pid)
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.Error):
                for child in driver.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        seen[child] = " ".join(child.cmdline()) or seen.get(child, "")
            time.sleep(0.2)
    finally:
        process.kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, f"{out}\n{err}"
    return make_run(directory, subprocess.CompletedProcess(WORDS, process.returncode, out, err)), seen


def test_two_processes_trained_and_none_is_left(parallel):
    _, seen = parallel
    assert len([title for title in seen.values() if title.startswith("ray::PolicyRank")]) == 2
    _, alive = psutil.wait_procs(seen, timeout=10)
    assert [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_engine_samples_from_what_both_processes_have_trained(parallel):
    run, _ = parallel
    assert sorted(run.metrics) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert run.metrics[step]["logprob_gap_mean"] <= 1e-4
        assert run.metrics[step]["logprob_gap_max"] <= 2e-3
        assert run.metrics[step]["failures_infra"] + run.metrics[step]["failures_data"] == 0
    versions = {version for rollout in run.rollouts for version in rollout["weight_versions"]}
    assert versions == {WARM_START, WARM_START + STEPS - 1}
    assert run.process.stderr == ""


def test_it_samples_the_very_tokens_of_a_job_in_one_process(parallel, grpo, tmp_path):
    """As it must after the same updates: rounding apart, the layout makes no difference."""
    run, _ = parallel
    alone = grpo(*WORDS, "-o", tmp_path / "alone", directory=tmp_path / "alone")
    for step in range(1, STEPS + 1):
        ours, theirs = run.metrics[step], alone.metrics[step]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert [rollout["token_ids"] for rollout in run.rollouts] == [
        rollout["token_ids"] for rollout in alone.rollouts
    ]
