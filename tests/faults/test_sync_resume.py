"""A job that is killed anywhere and resumed is the job that was never killed: rows, order, loss, weights.

One whole run is the yardstick. Each point kills the driver of another run at a moment drawn from a seed:
anywhere, or while a checkpoint is being written. RL_FAULTS_N says how many points.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

N = int(os.environ.get("RL_FAULTS_N", "2"))
STEPS = 12
DEADLINE_S = 240
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S * (2 * N + 2))]

WORDS = [
    *(f"algorithm.steps={STEPS}", "algorithm.prompts_per_step=4", "algorithm.group_size=4"),
    *("warm_start.steps=20", "warm_start.batch_size=16", "warm_start.phases=[{until_step: 20, share: 0.9}]"),
    # So young a policy earns little: an entropy term moves its weights in every step all the same.
    *(
        "algorithm.entropy_coefficient=0.02",
        "algorithm.max_skipped_steps=1000",
        "algorithm.updates_per_step=2",
    ),
    *("data.train.size=300", "data.held_out.size=8", "evaluation.every=4"),
    *("checkpointing.every=1", "checkpointing.keep=3", "logging.tensorboard=false"),
    *("logging.rollouts_per_step=99", "seed=5"),
]
# What a clock decides.
TIMINGS = ("seconds", "elapsed", "tokens_per_second", "time")


@dataclass(frozen=True)
class Outcome:
    """What a finished run says of its steps and holds in the end."""

    rollouts: list[tuple[Any, ...]]
    metrics: list[dict[str, float]]
    weights: dict[str, str]


def start(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rl_app_grpo", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
        start_new_session=True,
    )


def finish(*words: str | Path) -> str:
    process = start(*words)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return output


def outcome(directory: Path) -> Outcome:
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    last = directory / "checkpoints" / f"step_{STEPS}" / "policy"
    return Outcome(
        rollouts=[
            (line["step"], line["rollout_id"], line["token_ids"], line["logprobs"], line["advantage"])
            for line in lines
        ],
        metrics=[
            {name: value for name, value in entry.items() if not any(part in name for part in TIMINGS)}
            for entry in metrics
        ],
        weights={
            file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in last.glob("*.safetensors")
        },
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    finish("run", "-o", directory, *WORDS)
    return directory


def steps_done(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return file.read_text().count("\n") - 1 if file.exists() else -1


def is_writing(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(entry.name.startswith(".writing-") for entry in (directory / "checkpoints").iterdir())
    return False


def kill(process: subprocess.Popen[str], rng: random.Random) -> None:
    """The driver alone, as an out-of-memory killer does, or everything of its session at once."""
    family = psutil.Process(process.pid).children(recursive=True)
    if rng.random() < 0.5:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait(30)
    _, alive = psutil.wait_procs(family, timeout=30)
    left = [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"left behind: {left}"


@pytest.mark.parametrize("point", range(N))
def test_killed_anywhere_and_resumed_it_is_the_same_run(point: int, whole: Path, tmp_path: Path) -> None:
    rng = random.Random(point)
    within_a_save = point % 2 == 1
    directory = tmp_path / "run"
    process = start("run", "-o", directory, *WORDS)
    # Between the first checkpoint, before which there is nothing to resume, and the last step.
    target = rng.randrange(STEPS - 1)
    deadline = time.monotonic() + DEADLINE_S
    while steps_done(directory) < target or (within_a_save and not is_writing(directory)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    if not within_a_save:
        time.sleep(rng.random() * 0.3)
    aimed = is_writing(directory)
    running = process.poll() is None
    kill(process, rng)
    # It may have been over, or have just been published: then it was a kill between two steps.
    assert running, "the run had ended before the kill"
    resumed = finish("resume", directory)
    assert "resumed    after step" in resumed
    wanted, found = outcome(whole), outcome(directory)
    assert [rollout[:2] for rollout in found.rollouts] == [rollout[:2] for rollout in wanted.rollouts]
    assert found.rollouts == wanted.rollouts
    assert found.metrics == wanted.metrics
    assert found.weights == wanted.weights
    assert wanted.weights, "nothing was compared"
    print(f"point {point}: after step {target}, in a save: {aimed}")
    shutil.rmtree(directory)
