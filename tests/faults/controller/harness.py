"""One run that dies again and again, and what its outside witness says when it is done at last."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

START_S = 180
END_S = 60
ONE_DIGIT = (
    "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, operators: ['+'], "
    "allow_parentheses: false, allow_negation: false}"
)
WORDS = (
    *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "algorithm.max_skipped_steps=1000000"),
    *(f"data.train.options={ONE_DIGIT}", "data.train.size=300", "data.held_out.size=8"),
    *("warm_start.steps=30", "warm_start.batch_size=16", "warm_start.phases=[{until_step: 30, share: 0.5}]"),
    *("evaluation.every=4", "checkpointing.every=2", "async.save_groups_every_s=0.05"),
    *("logging.tensorboard=false", "logging.rollouts_per_step=0"),
)


@dataclass
class Life:
    """One process of the command, from its start to its end."""

    process: subprocess.Popen[bytes]
    output: Path
    began: float
    family: list[psutil.Process] = field(default_factory=list)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = END_S) -> int:
        """Its exit code; remembers all processes that it has had on the way."""
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            self.look()
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.said()[-3000:]}"
            time.sleep(0.02)
        return code

    def look(self) -> None:
        try:
            members = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.family = list({member.pid: member for member in (*self.family, *members)}.values())

    def worker(self) -> psutil.Process | None:
        """The policy's process."""
        self.look()
        for member in self.family:
            try:
                if "ColocatedWorker" in " ".join(member.cmdline()) and member.is_running():
                    return member
            except psutil.Error:
                continue
        return None


class Harness:
    """Starts and resumes one run, and counts what was done to it.

    Args:
        directory: for the run, the witness and the output of each life.
        steps: of the run.
        seed: of the moments of faults.
        words: further settings.
    """

    def __init__(self, directory: Path, *, steps: int, seed: int, words: tuple[str, ...] = ()) -> None:
        self.run = directory / "run"
        self.steps = steps
        self.random = random.Random(seed)
        self.fired: Counter[str] = Counter()
        self.orphans = 0
        self.seconds_to_step: list[float] = []
        self._directory = directory
        self._witness = directory / "witness.jsonl"
        self._words = (*WORDS, f"algorithm.steps={steps}", *words)
        self._lives: list[Life] = []
        # The step that each life went on from.
        self._from: list[int] = []

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that failed must not leave its run behind."""
        for life in self._lives:
            life.look()
            for member in (life.process, *life.family):
                with contextlib.suppress(psutil.Error, OSError):
                    member.kill()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the witness has seen."""
        if not self._witness.exists():
            return []
        return [json.loads(line) for line in self._witness.read_text().splitlines()]

    def start(self, fault: str | None = None) -> Life:
        """A new run, or the next life of this one."""
        words = ["resume", str(self.run)] if self.run.exists() else ["run", "-o", str(self.run), *self._words]
        output = self._directory / f"life-{len(self._lives)}.log"
        environment = {**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1", "WITNESS": str(self._witness)}
        environment.pop("FAULT", None)
        if fault is not None:
            environment["FAULT"] = fault
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.controller.entry", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        life = Life(process, output, time.monotonic())
        self._lives.append(life)
        return life

    def until_it_trains(self, life: Life, steps: int = 1) -> None:
        """Wait for so many steps of this very life."""
        deadline = time.monotonic() + START_S
        wanted = life.process.pid
        while sum(line["pid"] == wanted for line in self.lines) < steps:
            assert life.process.poll() is None, f"it ended by itself:\n{life.said()[-3000:]}"
            assert time.monotonic() < deadline, f"no step in {START_S} s:\n{life.said()[-3000:]}"
            life.look()
            time.sleep(0.02)
        if steps == 1:
            self.seconds_to_step.append(time.monotonic() - life.began)

    def buried(self, life: Life) -> None:
        """The life is over: nothing of it may run any more, and what it went on from is noted."""
        members = [m for m in life.family if m.pid != life.process.pid]
        _, alive = psutil.wait_procs(members, timeout=END_S)
        left = [m for m in alive if _runs(m)]
        self.orphans += len(left)
        for member in left:
            member.kill()
        found = re.findall(r"resumed    after step (\d+)", life.said())
        self._from.append(int(found[0]) if found else 0)

    def kill(self, life: Life, name: str) -> None:
        """SIGKILL to the driver."""
        life.look()
        life.process.kill()
        life.process.wait(END_S)
        self.fired[name] += 1
        self.buried(life)

    def told(self) -> str:
        """What was done, and how soon a new life has trained."""
        seconds = sorted(self.seconds_to_step)
        return (
            f"{sum(self.fired.values())} faults: {dict(self.fired)}; first new step after a start: median "
            f"{seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s"
        )

    def finish(self) -> None:
        """The last life, in which nothing happens."""
        life = self.start()
        assert life.wait(START_S + 2 * self.steps) == 0, life.said()[-3000:]
        self.buried(life)

    def check(self, *, max_staleness: int, steps: int | None = None, versions: bool = True) -> None:
        """Each row was trained once, in the history that counts, by weights that were young enough.

        Args:
            max_staleness: of the run.
            steps: that were trained, where the run did not come to its end.
            versions: whether tokens know theirs.
        """
        steps = self.steps if steps is None else steps
        history = self.history()
        assert [line["step"] for line in history] == list(range(1, steps + 1))
        trained = sorted(group for line in history for group in line["groups"])
        wanted = sorted(f"train/{position}" for position in range(4 * steps))
        assert trained == wanted, "multiset difference"
        counters = [line["counter"] for line in history]
        for index, line in enumerate(history if versions else []):
            assert line["unversioned"] == 0
            youngest_allowed = counters[max(0, index - max_staleness)]
            assert line["oldest"] >= youngest_allowed, f"step {line['step']} trains too old a token"
        assert self.orphans == 0
        own = [json.loads(line) for line in (self.run / "trained.jsonl").read_text().splitlines()]
        believed = [[f"train/{group['position']}" for group in line["groups"]] for line in own]
        assert [sorted(groups) for groups in believed] == [line["groups"] for line in history]

    def history(self) -> list[dict[str, Any]]:
        """The witnessed steps without those that a later resume has undone."""
        steps: list[dict[str, Any]] = []
        for life, begins in zip(self._lives, self._from, strict=True):
            own = [line for line in self.lines if line["pid"] == life.process.pid]
            if own or begins:
                del steps[begins:]
            steps += own
        return steps


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
