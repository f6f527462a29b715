"""A small job on a real NeMo Gym by the command line: vLLM over HTTP, refits, a resume, a Gym that dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rl_gym_bridge.supervision.processes import RUN_ID_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]

STEPS, WARM_START = 2, 4
WORDS = [
    *("run", "-c", "cpu-gym", "algorithm.prompts_per_step=4", "algorithm.group_size=4"),
    *(f"warm_start.steps={WARM_START}", "warm_start.batch_size=8"),
    f"warm_start.phases=[{{until_step: {WARM_START}, share: 0.9}}]",
    *("data.held_out.size=4", "evaluation.every=2", "checkpointing.every=1", "logging.rollouts_per_step=99"),
    # So few steps earn no reward; an entropy term changes the weights all the same.
    *("algorithm.entropy_coefficient=0.01", "cluster.start_timeout_s=400"),
]
DEADLINE_S = 400


@dataclass
class Command:
    """A ``grpo`` command that has ended, with everything that was seen to run for it."""

    directory: Path
    process: subprocess.CompletedProcess[str]
    seen: set[psutil.Process] = field(default_factory=set)


def of_gym(directory: Path) -> list[psutil.Process]:
    """Every process of the run's Gym, also those that have left their session: all inherit its name."""
    names = {folder.name.removeprefix("gym-") for folder in directory.glob("logs/gym/gym-*")}
    found = []
    for process in psutil.process_iter() if names else ():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_ID_VARIABLE) in names and process.status() != "zombie":
                found.append(process)
    return found


def below(process: psutil.Process) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        yield from process.children(recursive=True)


def nothing_is_left(command: Command) -> None:
    _, alive = psutil.wait_procs(command.seen, timeout=15)
    assert alive == []
    assert of_gym(command.directory) == []


@pytest.fixture(scope="module")
def gym_job(gym_python: str) -> Callable[..., Command]:
    """``gym_job(directory, *words, meanwhile=…)``: ``meanwhile(directory)`` is called again and again."""

    def job(directory: Path, *words: str, meanwhile: Callable[[Path], None] = lambda _: None) -> Command:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_app_grpo", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1", "RL_GYM_PYTHON": gym_python},
        )
        seen: set[psutil.Process] = set()
        deadline = time.monotonic() + DEADLINE_S
        try:
            driver = psutil.Process(process.pid)
            while process.poll() is None and time.monotonic() < deadline:
                seen |= {*below(driver), *of_gym(directory)}
                meanwhile(directory)
                time.sleep(0.2)
        finally:
            process.kill()
        out, err = process.communicate(timeout=60)
        return Command(directory, subprocess.CompletedProcess(words, process.returncode, out, err), seen)

    return job


@pytest.fixture(scope="module")
def trained(gym_job, tmp_path_factory) -> Command:
    directory = tmp_path_factory.mktemp("gym") / "run"
    command = gym_job(directory, *WORDS, f"algorithm.steps={STEPS}", "-o", str(directory))
    assert command.process.returncode == 0, f"{command.process.stdout}\n{command.process.stderr}"
    return command


@pytest.fixture(scope="module")
def run(make_run, trained):
    return make_run(trained.directory, trained.process)


def test_gyms_agent_played_every_rollout_and_its_verifier_judged_it(run):
    assert run.summary["steps"] == STEPS
    for step in range(1, STEPS + 1):
        metrics = run.metrics[step]
        assert metrics["failures_infra"] + metrics["failures_data"] == 0
        assert metrics["samples_valid"] == 16
    for rollout in run.rollouts:
        assert rollout["agent"] == "lc_equivalence_rule_simple_agent"
        assert rollout["reward"] == rollout["metrics"]["equivalence_score"]
    assert run.metrics[0]["held_out/equivalence_score"] == run.metrics[0]["held_out/accuracy"]


def test_over_http_too_it_is_on_policy_because_the_engine_is_given_the_weights_before_each_step(run):
    versions = {step: set() for step in range(1, STEPS + 1)}
    for rollout in run.rollouts:
        versions[rollout["step"]] |= set(rollout["weight_versions"])
    assert versions == {step: {WARM_START + step - 1} for step in range(1, STEPS + 1)}
    # An engine with the weights of the step before would be off by far more.
    for step in range(1, STEPS + 1):
        assert run.metrics[step]["logprob_gap_max"] <= 2e-3
        assert run.metrics[step]["logprob_gap_mean"] <= 1e-4
    # Those of step 1 were handed over before it, to be measured.
    assert run.metrics[0]["refit_seconds"] > 0
    assert run.metrics[2]["refit_seconds"] > 0


def test_after_it_nothing_runs_and_gyms_words_are_in_the_run_directory(trained):
    assert len(trained.seen) > 8
    nothing_is_left(trained)
    assert list(trained.directory.glob("logs/gym/gym-*/gym.log"))


def test_rollouts_that_are_repeated_after_a_resume_are_the_same(gym_job, make_run, run, trained):
    """Every rollout has a seed of its own, whatever the order in which Gym's requests reach the engine."""
    before = {rollout["rollout_id"]: rollout for rollout in run.rollouts if rollout["step"] == STEPS}
    (trained.directory / "summary.json").unlink()
    newest = trained.directory / "checkpoints" / f"step_{STEPS}"
    newest.rename(trained.directory / "not-a-checkpoint")
    command = gym_job(trained.directory, "resume", str(trained.directory))
    assert command.process.returncode == 0, f"{command.process.stdout}\n{command.process.stderr}"
    again = {
        rollout["rollout_id"]: rollout
        for rollout in make_run(trained.directory, command.process).rollouts
        if rollout["step"] == STEPS
    }
    assert {name: rollout["token_ids"] for name, rollout in again.items()} == {
        name: rollout["token_ids"] for name, rollout in before.items()
    }
    nothing_is_left(command)


def test_a_gym_that_dies_ends_the_run_with_its_name_and_with_nothing_left(gym_job, tmp_path):
    directory = tmp_path / "run"
    killed: list[int] = []

    def kill_the_verifier(directory: Path) -> None:
        file = directory / "metrics.jsonl"
        if killed or not file.exists() or '"step": 1,' not in file.read_text():
            return
        for process in of_gym(directory):
            with contextlib.suppress(psutil.Error):
                if process.cwd().endswith("resources_servers/equivalence_rule"):
                    process.send_signal(signal.SIGKILL)
                    killed.append(process.pid)

    command = gym_job(
        directory, *WORDS, "algorithm.steps=500", "-o", str(directory), meanwhile=kill_the_verifier
    )
    assert killed
    assert command.process.returncode == 1, f"{command.process.stdout}\n{command.process.stderr}"
    assert "continue with: grpo resume" in command.process.stderr
    assert "GymServerDied" in (directory / "logs" / "error.log").read_text()
    nothing_is_left(command)


def test_an_agent_that_gym_does_not_have_ends_the_start_as_a_wrong_configuration(gym_job, tmp_path):
    directory = tmp_path / "run"
    wrong = "environment.gym.agent=lc_equivalence_simple_agent"
    command = gym_job(directory, *WORDS, "algorithm.steps=1", wrong, "-o", str(directory))
    assert command.process.returncode == 2, f"{command.process.stdout}\n{command.process.stderr}"
    assert "did you mean lc_equivalence_rule_simple_agent?" in command.process.stderr
    nothing_is_left(command)
