"""A run that ends in its middle and goes on later: what was kept counts once, what was not runs again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rl_gym_bridge.coverage import Coverage
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.request_body import GenerationOverrides
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.rollout_groups import RolloutGroup
from rl_gym_bridge.rollout_metrics import RolloutMetrics
from rl_gym_bridge.rollouts import stream_nemo_gym_rollouts
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

ROWS = [
    GymRow.from_mapping(
        {"responses_create_params": {"input": f"q{index}"}, "agent_ref": {"name": "a"}, "row_id": f"r{index}"}
    )
    for index in range(6)
]
REWARDS = {"r0": 1.0, "r1": 0.0, "r2": 0.1, "r3": 0.2, "r5": 1 / 3}


def ended(request: RolloutRequest) -> RolloutResult:
    """What the row always comes to; that of ``r4`` is a failure."""
    outcome: Trajectory | RolloutFailure
    if request.row_id == "r4":
        outcome = RolloutFailure(
            request.group_id, request.rollout_id, request.agent, FailureKind.INFRA, "HTTP 500"
        )
    else:
        turn = Turn((1,), (2, 3), (-0.5, -0.25))
        outcome = Trajectory(
            (turn,),
            REWARDS[request.row_id],
            StopReason.STOP,
            request.group_id,
            request.rollout_id,
            request.agent,
        )
    return RolloutResult(request, outcome, seconds=0.125)


class Runner:
    """Ends the rollouts in their order; ``hangs`` never end, until the stream is closed."""

    def __init__(self, hangs: Sequence[str] = ()) -> None:
        self.hangs = hangs
        self.asked: list[str] = []
        self.given: list[str] = []
        self.closed = False

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        self.asked += [request.rollout_id for request in requests]
        try:
            for request in requests:
                if request.rollout_id not in self.hangs:
                    self.given.append(request.rollout_id)
                    yield ended(request)
            if self.hangs:
                await asyncio.sleep(60.0)
        finally:
            self.closed = True


class Kept:
    """Groups as lines of a file: one is written whole, or it does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = RolloutMetrics()
        self.coverage = Coverage()

    def add(self, group: RolloutGroup) -> None:
        results = [dataclasses.asdict(result) for result in group.results]
        line = json.dumps({"row_id": group.row.row_id, "results": results})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        for result in group.results:
            self.metrics.add(result)
            self.coverage.expect([result.request])
            self.coverage.add(result)

    def lines(self) -> list[dict[str, Any]]:
        text = self.path.read_text("utf-8") if self.path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def done(self) -> set[str]:
        """Rows that nobody has to run again: all their rollouts are kept, and one of them is a sample."""
        return {row_id for row_id, task in self.coverage.tasks.items() if task.completed}

    def results(self) -> list[RolloutResult]:
        """From the file alone."""
        return [read(fields) for line in self.lines() for fields in line["results"]]


def read(fields: dict[str, Any]) -> RolloutResult:
    outcome = fields["outcome"]
    made: Trajectory | RolloutFailure
    if "turns" in outcome:
        turns = tuple(
            Turn(**{name: tuple(v) if isinstance(v, list) else v for name, v in turn.items()})
            for turn in outcome["turns"]
        )
        made = Trajectory(**{**outcome, "turns": turns, "stop_reason": StopReason(outcome["stop_reason"])})
    else:
        made = RolloutFailure(**{**outcome, "kind": FailureKind(outcome["kind"])})
    return RolloutResult(**{**fields, "request": RolloutRequest(**fields["request"]), "outcome": made})


def run(runner: Runner, rows: Sequence[GymRow], kept: Kept, *, attempt: int, stop_after: int) -> None:
    """Keep groups as they come; after ``stop_after`` of them the process is told to end, and closes."""

    async def scenario() -> None:
        settings: dict[str, Any] = {
            "group_size": 2,
            "step": 0,
            "seed": 0,
            "generation": GenerationOverrides(),
            "group_prefix": f"attempt {attempt}",
            "timeout_s": 20.0,
        }
        count = 0
        async with aclosing(stream_nemo_gym_rollouts(runner, rows, **settings)) as stream:
            async for group in stream:
                kept.add(group)
                count += 1
                if count == stop_after:
                    break

    asyncio.run(scenario())


def test_k11_rows_that_ended_are_not_run_again_and_rows_that_were_killed_are(tmp_path: Path) -> None:
    """K11: of r2 one rollout of two ends before the run is told to end, of r3 none: neither is done."""
    kept = Kept(tmp_path / "results.jsonl")
    killed = ["attempt 0/0/2/1", "attempt 0/0/3/0", "attempt 0/0/3/1"]
    first = Runner(hangs=killed)
    run(first, ROWS[:4], kept, attempt=0, stop_after=2)
    assert first.closed
    assert kept.done() == {"r0", "r1"}
    rest = [row for row in ROWS[:4] if row.row_id not in kept.done()]
    second = Runner()
    run(second, rest, kept, attempt=1, stop_after=99)
    assert second.asked == [f"attempt 1/0/{row}/{index}" for row in range(2) for index in range(2)]
    assert [line["row_id"] for line in kept.lines()] == ["r0", "r1", "r2", "r3"]
    assert kept.done() == {"r0", "r1", "r2", "r3"}
    assert kept.coverage.never_completed == ()


def test_k11_a_half_ended_group_is_never_handed_over(tmp_path: Path) -> None:
    """K11: what a runner gives while the stream is closed is nobody's, even if it completes a group."""
    kept = Kept(tmp_path / "results.jsonl")
    runner = Runner(hangs=["attempt 0/0/1/1"])
    run(runner, ROWS[:3], kept, attempt=0, stop_after=1)
    assert "attempt 0/0/1/0" not in [result.request.rollout_id for result in kept.results()]
    assert kept.done() == {"r0"}


def test_k7_the_live_mean_is_the_one_that_the_file_gives_after_a_resume(tmp_path: Path) -> None:
    """K7: four rows are kept, one fails, one is lost before it is kept; the run is taken up again."""
    kept = Kept(tmp_path / "results.jsonl")
    run(Runner(), ROWS, kept, attempt=0, stop_after=5)
    assert kept.done() == {"r0", "r1", "r2", "r3"}
    assert kept.metrics.summary() == RolloutMetrics.of(kept.results()).summary()
    rest = [row for row in ROWS if row.row_id not in kept.done()]
    run(Runner(), rest, kept, attempt=1, stop_after=99)
    live = kept.metrics.summary()
    assert live == RolloutMetrics.of(kept.results()).summary()
    assert (live["a/samples"], live["a/failures_infra"]) == (10.0, 4.0)
    assert live["a/reward_mean"] == sum(2 * reward for reward in REWARDS.values()) / 10
    assert kept.coverage.never_completed == ("r4",)
