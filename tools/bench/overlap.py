"""What rollouts that run ahead of training save: the asynchronous job's time over the synchronous one's.

python -m tools.bench.overlap

Both train the same number of groups of the CPU recipe, with the same real policy and engine, in one run of
this script. Every rollout waits as a slow environment would: not at all, or for a log-normal time that
depends on its row and number alone. The synchronous job waits for the slowest of each step, as it would if
its environment judged all at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from rl_algorithms.loops import LoopResult
from rl_app_core.chat_model import EngineChatModel
from rl_app_core.config import SingleControllerConfig, load_config
from rl_app_core.grpo import grpo_trainer
from rl_app_core.job import Loop, Trainer, run_job, synchronous
from rl_app_core.preflight import prepare
from rl_app_core.reporting import RunReporter
from rl_app_core.rollouts import Rollouts
from rl_app_core.run_directory import RunDirectory
from rl_app_single_controller.asynchronous import Asynchronous
from rl_app_single_controller.plan import controller_settings
from rl_app_single_controller.recipes import RECIPES
from rl_app_single_controller.sharing import shared_engine
from rl_gym_bridge.local_runner import LocalRunner
from rl_gym_bridge.requests import RolloutRequest, RolloutResult, RolloutRunner


@dataclass(frozen=True)
class Latency:
    """Log-normal seconds with this median and this deviation of their logarithm; a median of 0 is none."""

    median_s: float
    sigma: float = 1.0

    def of(self, group: int, index: int) -> float:
        if not self.median_s:
            return 0.0
        seed = hashlib.sha256(f"{group}/{index}".encode()).digest()
        return self.median_s * random.Random(seed).lognormvariate(0.0, self.sigma)


@dataclass
class Timed:
    """A loop that also says how long it took."""

    latency: Latency
    seconds: float = 0.0
    training_s: float = 0.0
    slowest: list[float] = field(default_factory=list)

    def took(self, began: float, result: LoopResult) -> LoopResult:
        self.seconds = time.perf_counter() - began
        self.training_s = result.seconds_training
        return result


class Synchronous(Timed):
    def __call__(self, loop: Loop) -> LoopResult:
        began = time.perf_counter()
        rollouts = _SlowRollouts(loop.runtime.rollouts, self)
        runtime = replace(loop.runtime, rollouts=rollouts)  # type: ignore[arg-type]
        return self.took(began, synchronous(replace(loop, runtime=runtime)))


class _SlowRollouts:
    def __init__(self, inner: Rollouts, timed: Timed) -> None:
        self._inner = inner
        self._timed = timed

    def rollouts(self, rows: Sequence[Any], *, group_size: int, step: int, **words: Any) -> Any:
        found = self._inner.rollouts(rows, group_size=group_size, step=step, **words)
        first = (step - 1) * len(rows)
        latency = self._timed.latency
        slowest = max(latency.of(first + g, i) for g in range(len(rows)) for i in range(group_size))
        self._timed.slowest.append(slowest)
        time.sleep(slowest)
        return found


class AheadOfTraining(Timed):
    config: SingleControllerConfig

    def __call__(self, loop: Loop) -> LoopResult:
        began = time.perf_counter()
        config, runtime = self.config, loop.runtime
        with shared_engine(runtime.engine, timeout_s=600.0) as engine:
            chat = EngineChatModel(engine, runtime.conversation, config.generation, runtime.max_context)
            runner = LocalRunner(
                loop.prepared.environments, chat, max_new_tokens=config.generation.max_new_tokens
            )
            ahead = Asynchronous(config, controller_settings)
            return self.took(began, ahead.run(loop, _SlowRunner(runner, self.latency)))


class _SlowRunner:
    def __init__(self, inner: RolloutRunner, latency: Latency) -> None:
        self._inner = inner
        self._latency = latency

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        results: asyncio.Queue[RolloutResult] = asyncio.Queue()

        async def later(result: RolloutResult) -> None:
            _, group, index = result.request.rollout_id.split("/")[:3]
            await asyncio.sleep(self._latency.of(int(group), int(index)))
            await results.put(result)

        async with contextlib.AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            async for result in self._inner.run_rollouts(requests):
                group.create_task(later(result))
            for _ in requests:
                yield await results.get()


def run(loop: Timed, config: SingleControllerConfig) -> None:
    """One job in a folder of its own."""
    trainer: Trainer = replace(grpo_trainer(config), loop=loop)  # type: ignore[arg-type]
    with TemporaryDirectory() as folder, Console(file=Path(folder, "said").open("w")).capture():
        directory = RunDirectory.create(Path(folder, "run"), config, "bench")
        with RunReporter(Console(file=Path(folder, "report").open("w"))) as reporter:
            run_job(prepare(config), trainer, directory, reporter, began=time.perf_counter())


def analytic(sync: Synchronous, steps: int, max_staleness: int) -> float:
    """The ratio if all other work cost what it costs the synchronous job and nothing got in its way.

    Rows of step s are begun with version s − max_staleness; it begins when they and step s − 1 are done.
    """
    train = sync.training_s / steps
    other = (sync.seconds - sum(sync.slowest)) / steps
    done: list[float] = []
    for step in range(steps):
        begun = done[step - max_staleness - 1] if step > max_staleness else 0.0
        ready = begun + (other - train) + sync.slowest[step]
        done.append(max(ready, done[-1] if done else 0.0) + train)
    return done[-1] / sync.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--median", type=float, nargs="*", default=[0.0, 0.1], help="seconds")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--max-staleness", type=int, nargs="*", default=[1])
    parser.add_argument("--repeats", type=int, default=1)
    words = parser.parse_args()
    print(f"{'median s':<10}{'staleness':>10}{'sync s':>9}{'async s':>9}{'ratio':>7}{'analytic':>10}")
    for median in words.median:
        for staleness in words.max_staleness:
            ratios: list[float] = []
            for _ in range(words.repeats):
                config = load_config(
                    RECIPES.find("cpu"),
                    [
                        f"algorithm.steps={words.steps}",
                        f"async.max_staleness={staleness}",
                        "data.held_out.size=8",
                        "evaluation.every=100000",
                        "checkpointing.every=100000",
                        "algorithm.max_skipped_steps=100000",
                        "logging.tensorboard=false",
                    ],
                    model=SingleControllerConfig,
                )
                latency = Latency(median, words.sigma)
                sync, ahead = Synchronous(latency), AheadOfTraining(latency)
                ahead.config = config
                run(sync, config)
                run(ahead, config)
                ratios.append(ahead.seconds / sync.seconds)
                bound = analytic(sync, words.steps, staleness)
                print(
                    f"{median:<10}{staleness:>10}{sync.seconds:>9.1f}{ahead.seconds:>9.1f}"
                    f"{ratios[-1]:>7.2f}{bound:>10.2f}"
                )
            if words.repeats > 1:
                print(json.dumps({"median": median, "ratio": statistics.median(ratios)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
