"""However a job on a real NeMo Gym ends, it says why, and no process is left."""

from __future__ import annotations

import contextlib
import signal

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]

WORDS = [
    *("run", "-c", "cpu-gym", "algorithm.prompts_per_step=4", "algorithm.group_size=4", "warm_start.steps=0"),
    *("warm_start.phases=[]", "algorithm.steps=900", "data.held_out.size=4", "evaluation.every=900"),
    *("algorithm.max_skipped_steps=900", "cluster.start_timeout_s=400"),
]


def servers(processes: list[psutil.Process], name: str) -> list[psutil.Process]:
    """Those of Gym that work in the folder of a server."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.cwd().endswith(name):
                found.append(process)
    return found


@pytest.mark.faults
def test_a_gym_that_dies_ends_the_run_with_its_name(gym_job, tmp_path):
    directory = tmp_path / "run"
    killed: list[int] = []

    def kill_the_verifier(driver: psutil.Process, of_gym: list[psutil.Process]) -> None:
        file = directory / "metrics.jsonl"
        if killed or not file.exists() or '"step": 1,' not in file.read_text():
            return
        for process in servers(of_gym, "resources_servers/equivalence_rule"):
            process.send_signal(signal.SIGKILL)
            killed.append(process.pid)

    run = gym_job(*WORDS, "-o", directory, directory=directory, expect=12, meanwhile=kill_the_verifier)
    assert killed
    assert "continue with: grpo resume" in run.process.stderr
    assert "GymServerDied" in (directory / "logs" / "error.log").read_text()
    run.assert_nothing_is_left()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_a_signal_while_everything_starts_ends_everything(gym_job, number, code, tmp_path):
    directory = tmp_path / "run"
    sent: list[int] = []

    def send(driver: psutil.Process, of_gym: list[psutil.Process]) -> None:
        # Its Ray runs, its servers do not yet.
        if not sent and len(of_gym) > 4:
            driver.send_signal(number)
            sent.append(len(of_gym))

    run = gym_job(*WORDS, "-o", directory, directory=directory, expect=code, meanwhile=send)
    assert sent
    run.assert_nothing_is_left()


def test_an_agent_that_gym_does_not_have_is_a_wrong_configuration(gym_job, tmp_path):
    directory = tmp_path / "run"
    wrong = "environment.gym.agent=lc_equivalence_simple_agent"
    run = gym_job(*WORDS, wrong, "-o", directory, directory=directory, expect=2)
    assert "did you mean lc_equivalence_rule_simple_agent?" in run.process.stderr
    run.assert_nothing_is_left()
