"""What the controller costs by itself: microseconds per rollout with an engine and a trainer that do nothing.

python -m tools.bench.controller

The state machine alone, and the whole shell with its tasks and events; at one thousand and a hundred thousand
rollouts. Memory is what the process has grown by. As many groups are in flight as max_staleness 1 allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_algorithms.controller import (
    Begin,
    Controller,
    ControllerSettings,
    Evaluate,
    Evaluated,
    Event,
    Publish,
    Published,
    RolloutEnded,
    Save,
    Saved,
    Start,
    Train,
    Trained,
)
from rl_algorithms.group_files import GroupStore
from rl_algorithms.staleness import PublishedVersions
from rl_app_single_controller.rollout_pump import RolloutPump
from rl_app_single_controller.shell import Shell
from rl_app_single_controller.train_pump import TrainPump
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.trajectory import StopReason, Trajectory, Turn

GROUP_SIZE = 8


def settings(rollouts: int, prompts_per_step: int) -> ControllerSettings:
    return ControllerSettings(
        steps=max(1, rollouts // (prompts_per_step * GROUP_SIZE)),
        prompts_per_step=prompts_per_step,
        group_size=GROUP_SIZE,
    )


def machine_alone(own: ControllerSettings) -> float:
    """Seconds for all rollouts of the run."""
    controller = Controller(own)
    events: deque[Event] = deque([Begin()])
    began = time.perf_counter()
    while events:
        for command in controller.handle(events.popleft(), time.monotonic()):
            match command:
                case Start(position, tries):
                    events.extend(RolloutEnded(position, one.index, one.number, None) for one in tries)
                case Train(version, _):
                    events.append(Trained(version))
                case Publish(version):
                    events.append(Published(version))
                case Evaluate(version):
                    events.append(Evaluated(version))
                case Save(version):
                    events.append(Saved(version))
    if not controller.over:
        raise RuntimeError(controller.describe())
    return time.perf_counter() - began


TRAJECTORY = Trajectory(
    turns=(Turn((1, 2, 3), (4, 5), (-0.1, -0.2)),),
    reward=1.0,
    stop_reason=StopReason.STOP,
    group_id="train/0",
    rollout_id="train/0/0",
    weight_versions=(0, 0),
)


class NullRunner:
    """Answers every request in the next turn of the event loop."""

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        for request in requests:
            await asyncio.sleep(0)
            yield RolloutResult(request, TRAJECTORY)


class NullPolicy:
    """Weights that are never looked at: those of the first token are young enough for ever."""

    def weight_version(self) -> int:
        return 0


class NullTrainer:
    def train(self, *_: Any) -> None: ...

    def evaluate(self, _: int) -> bool:
        return False

    def save(self, *_: Any) -> None: ...


def requests_of(position: int, tries: Sequence[Any]) -> list[RolloutRequest]:
    group = f"train/{position}"
    return [
        RolloutRequest(f"{group}/{one.index}/{one.number}", group, str(position), "none", {}) for one in tries
    ]


async def whole_shell(own: ControllerSettings, folder: Path) -> float:
    """The same with tasks, threads and an event loop."""
    controller = Controller(own)
    shell = Shell(controller)
    versions = _Newest(controller)
    trainer = TrainPump(
        trainer=NullTrainer(),  # type: ignore[arg-type]
        policy=NullPolicy(),
        refresh=lambda: None,
        versions=versions,
        groups=GroupStore(folder),
        post=shell.post,
    )
    pump = RolloutPump(NullRunner(), requests_of, versions, shell.post)
    began = time.perf_counter()
    await shell.run(Begin(), pump, trainer)
    return time.perf_counter() - began


class _Newest(PublishedVersions):
    """Says that every token is of the weights of now, as an engine that is always up to date would."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(0, 0)
        self._controller = controller

    def publish(self, counter: int) -> None: ...

    def span(self, counters: Any) -> tuple[int, int]:
        return self._controller.version, self._controller.version


def measure(rollouts: int, prompts_per_step: int, part: str) -> dict[str, float]:
    """One measurement, in this process."""
    own = settings(rollouts, prompts_per_step)
    count = own.rows * GROUP_SIZE
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if part == "machine":
        seconds = machine_alone(own)
    else:
        with TemporaryDirectory() as folder:
            seconds = asyncio.run(whole_shell(own, Path(folder)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"rollouts": count, "us_per_rollout": 1e6 * seconds / count, "peak_mib": grown / 1024}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[1_000, 100_000])
    parser.add_argument("--prompts-per-step", type=int, nargs="*", default=[32, 512])
    parser.add_argument("--one", nargs=3, metavar=("ROLLOUTS", "PROMPTS", "PART"), help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        rollouts, prompts, part = words.one
        print(json.dumps(measure(int(rollouts), int(prompts), part)))
        return 0
    print(f"{'part':<10}{'groups/step':>12}{'rollouts':>10}{'us/rollout':>12}{'grown MiB':>12}")
    for part in ("machine", "shell"):
        for prompts in words.prompts_per_step:
            for rollouts in words.rollouts:
                # Each in a process of its own, so that one's heap is not the other's.
                command = [sys.executable, "-m", "tools.bench.controller", "--one"]
                done = subprocess.run(
                    [*command, str(rollouts), str(prompts), part], capture_output=True, text=True, check=True
                )
                found = json.loads(done.stdout)
                print(
                    f"{part:<10}{prompts:>12}{found['rollouts']:>10}{found['us_per_rollout']:>12.1f}"
                    f"{found['peak_mib']:>12.1f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
