"""A real controller with a runner and a trainer that a test moves: how a run ends, whatever ends it.

The names of some tests begin with the public fault that they are about (BUGS, areas G and K).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_algorithms.controller import (
    Begin,
    Cancel,
    Controller,
    ControllerSettings,
    Counters,
    RetryPolicy,
    RolloutEnded,
    Save,
    Saved,
    Snapshot,
    StalledError,
    Start,
    Train,
    Trained,
    Try,
)
from rl_algorithms.group_files import GroupStore
from rl_algorithms.replay import Group, Missing
from rl_algorithms.staleness import PublishedVersions, StalenessError
from rl_app_single_controller import asynchronous, shell
from rl_app_single_controller.rollout_pump import RolloutPump
from rl_app_single_controller.shell import GraceOver, Shell
from rl_app_single_controller.train_pump import TrainPump
from rl_gym_bridge.failures import GymConfigError, GymHttpError, GymStopped, GymTokenError
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

NO_DELAY = RetryPolicy(first_delay_s=0.0, longest_delay_s=0.0)
# Far more than any of these runs takes; a run that hangs is a failure and not a hang.
LIMIT_S = 10.0
# So soon after what ended it a run has to be over, in looks at a signal of 0.1 s each.
TICKS = 2


def settings(**changes: Any) -> ControllerSettings:
    values: dict[str, Any] = {"steps": 3, "prompts_per_step": 2, "group_size": 2, "retry": NO_DELAY}
    return ControllerSettings(**(values | changes))


def requests_of(position: int, tries: Sequence[Try]) -> list[RolloutRequest]:
    return [
        RolloutRequest(f"train/{position}/{one.index}/{one.number}", f"train/{position}", "row", "adder", {})
        for one in tries
    ]


def sample(request: RolloutRequest, *versions: int, forks: tuple[Trajectory, ...] = ()) -> Trajectory:
    tokens = tuple(range(len(versions)))
    return Trajectory(
        (Turn((1,), tokens, (-0.5,) * len(tokens)),),
        1.0,
        StopReason.STOP,
        request.group_id,
        request.rollout_id,
        weight_versions=versions,
        forks=forks,
    )


Play = Callable[[Sequence[RolloutRequest], int], AsyncIterator[RolloutResult]]


class Runner:
    """Plays as it is told; remembers what was asked for and what was cancelled."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.asked: list[list[str]] = []
        self.cancelled: list[list[str]] = []

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        names = [request.rollout_id for request in requests]
        self.asked.append(names)
        try:
            async for result in self._play(requests, len(self.asked)):
                yield result
        except asyncio.CancelledError:
            self.cancelled.append(names)
            raise


class World:
    """Everything around a shell, and the trainer itself: its weights are a number.

    ``on`` holds what is called in place of nothing, in the thread of the call, by the call's name: ``train``,
    ``evaluate``, ``save``, ``refresh``, ``groups``.
    """

    def __init__(self, directory: Path, own: ControllerSettings, play: Play | None = None) -> None:
        self.on: dict[str, Callable[[int], Any]] = {}
        self.did: list[tuple[str, int]] = []
        self.steps: list[list[Group]] = []
        self.snapshots: list[Snapshot] = []
        self.counters: list[Counters] = []
        self.weights = self.served = 0
        self.refreshed = 0
        self.controller = Controller(own)
        self.runner = Runner(play or self.at_once)
        self.groups = GroupStore(directory / "groups")
        self.versions = PublishedVersions(0, 0)
        self.ticks = 0
        self.looked_at = time.monotonic()
        self.failed_at_tick: int | None = None
        self.rollouts: RolloutPump | None = None

    # What plays

    async def at_once(self, requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        for request in requests:
            await asyncio.sleep(0)
            yield RolloutResult(request, sample(request, self.served))

    async def once_saved(self, requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        """Behind the first checkpoint, which would hold what had been finished before."""
        while ("keep", 0) not in self.did:
            await asyncio.sleep(0.001)
        async for result in self.at_once(requests, call):
            yield result

    async def never(self, requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        await asyncio.Event().wait()
        yield RolloutResult(requests[0], sample(requests[0], 0))

    # What trains

    def train(self, version: int, groups: Sequence[Group], counters: Counters) -> None:
        self._do("train", version)
        self.weights += 1
        self.steps.append(list(groups))
        self.counters.append(counters)

    def evaluate(self, version: int) -> bool:
        return bool(self._do("evaluate", version))

    def save(self, version: int, snapshot: Snapshot) -> None:
        self._do("save", version)
        self.snapshots.append(snapshot)

    def weight_version(self) -> int:
        return self.weights

    def refresh(self) -> None:
        self.refreshed += 1
        self._do("refresh", self.weights)
        self.served = self.weights

    def write(self, anchor: int, groups: Sequence[Group]) -> None:
        self._do("groups", anchor)

    def keep_only(self, anchor: int) -> None:
        self.did.append(("keep", anchor))

    def _do(self, name: str, number: int) -> Any:
        self.did.append((name, number))
        return self.on[name](number) if name in self.on else None

    # The run

    def fails(self, error: Exception) -> Callable[..., Any]:
        """Raise it, and remember how often the shell had ticked by then."""

        def fail(*_: Any) -> Any:
            self.fails_now()
            raise error

        return fail

    def fails_now(self) -> None:
        self.failed_at_tick = self.ticks

    def run(
        self,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        grace_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> bool:
        def look() -> bool:
            # A shell that was woken by an event looks as well; a tick is one that found nothing to do.
            now, before = time.monotonic(), self.looked_at
            self.ticks += now - before > 0.9 * shell._LOOK_EVERY_S
            self.looked_at = now
            return should_stop()

        async def run() -> bool:
            async with asyncio.timeout(LIMIT_S):
                one = Shell(self.controller, should_stop=look, grace_s=grace_s, clock=clock)
                pump = RolloutPump(self.runner, requests_of, self.versions, one.post)
                self.rollouts = pump
                trainer = TrainPump(
                    trainer=self,  # type: ignore[arg-type]
                    policy=self,
                    refresh=self.refresh,
                    versions=self.versions,
                    groups=self,  # type: ignore[arg-type]
                    post=one.post,
                )
                try:
                    return await one.run(Begin(), pump, trainer)
                finally:
                    assert asyncio.all_tasks() == {asyncio.current_task()}, "a rollout is left"
                    assert pump.running == 0

        return asyncio.run(run())

    def ended_at_once(self) -> bool:
        assert self.failed_at_tick is not None, "nothing has failed"
        return self.ticks - self.failed_at_tick <= TICKS

    @property
    def trained(self) -> list[list[int]]:
        return [[group.position for group in step] for step in self.steps]

    def calls(self, name: str) -> list[int]:
        return [number for what, number in self.did if what == name]


@pytest.fixture
def new(tmp_path: Path) -> Callable[..., World]:
    return lambda play=None, **changes: World(tmp_path, settings(**changes), play)


@pytest.fixture
def gate() -> Any:
    """What holds a thread up until the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def no_thread_is_left(gate: threading.Event) -> Any:
    """Idle threads of a pool that was shut down end by themselves; one that works does not."""
    before = set(threading.enumerate())
    yield
    gate.set()
    deadline = time.monotonic() + 5.0
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def play_of(world: World, special: Callable[[Sequence[RolloutRequest], int], Any]) -> Play:
    """As at once, but where ``special`` gives an async generator."""

    async def play(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        async for result in special(requests, call) or world.at_once(requests, call):
            yield result

    return play


def test_a_run_to_its_end(new):
    world = new(evaluate_every=2, checkpoint_every=2)
    assert world.run() is False
    assert world.trained == [[0, 1], [2, 3], [4, 5]]
    assert sorted(name for asked in world.runner.asked for name in asked) == [
        f"train/{position}/{index}/0" for position in range(6) for index in range(2)
    ]
    assert world.calls("train") == [1, 2, 3]
    assert world.calls("refresh") == [0, 1, 2, 3]
    assert world.calls("evaluate") == [0, 2, 3]
    assert world.calls("save") == [0, 2, 3]
    assert [snapshot.version for snapshot in world.snapshots] == [0, 2, 3]
    assert world.runner.cancelled == []
    assert world.controller.over
    for version, step in enumerate(world.steps):
        for group in step:
            assert [type(outcome) for outcome in group.outcomes] == [Trajectory] * 2
            assert 0 <= version - group.oldest <= 1


def test_what_is_done_to_the_policy_is_done_one_thing_at_a_time_in_one_thread(new):
    world = new(evaluate_every=1, checkpoint_every=1, save_groups_every_s=0.001)
    busy = threading.Lock()
    threads: set[str] = set()

    def alone(number: int) -> None:
        assert busy.acquire(blocking=False), "two at once"
        threads.add(threading.current_thread().name)
        time.sleep(0.002)
        busy.release()

    world.on = dict.fromkeys(("train", "evaluate", "save", "refresh"), alone)
    world.run()
    assert len(threads) == 1
    assert threads != {threading.current_thread().name}, "beside the event loop"


def test_an_evaluation_that_is_good_enough_ends_the_run(new):
    world = new(evaluate_every=1)
    world.on["evaluate"] = lambda version: version == 1
    assert world.run() is False
    assert world.calls("train") == [1]
    assert world.calls("save")[-1] == 1


def test_a_step_is_told_the_counters_as_they_were_and_a_checkpoint_the_state_when_it_was_asked_for(new, gate):
    """Both go on changing while the trainer's thread is at work."""
    world = new(steps=1, checkpoint_every=1)

    def wait_a_little(number: int) -> None:
        world.controller.counters.late += 7
        time.sleep(0.05)

    world.on["train"] = world.on["save"] = wait_a_little
    world.run()
    assert world.counters[0].late == 7, "one save had begun before it was asked for"
    assert world.counters[0] is not world.controller.counters
    assert [snapshot.counters.late for snapshot in world.snapshots] == [0, 14]
    assert world.snapshots[0].next_position == 2
    assert world.snapshots[1].trained.below == 2


# What ends a run at once


def test_g7_an_exception_of_the_runner_ends_the_run_at_once_as_it_was_raised(new):
    """A dead collector must not leave the trainer polling an empty buffer: 12,996 times once."""
    world = new()
    error = ValueError("the collector is dead")
    later = [0]

    async def dies(requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        yield RolloutResult(requests[0], sample(requests[0], 0))
        # The others of the first step hang, so nothing but this can end the run.
        await asyncio.sleep(0.05)
        world.fails(error)()

    def special(requests: Sequence[RolloutRequest], call: int) -> Any:
        later[0] += 1
        return dies(requests) if call == 2 else world.never(requests, call)

    world.runner = Runner(play_of(world, special))
    with pytest.raises(ValueError, match="the collector is dead") as raised:
        world.run()
    assert raised.value is error
    assert world.ended_at_once()
    assert len(world.runner.cancelled) == 3, "the other rows are given up"


def test_g7_a_runner_that_fails_before_its_first_result_ends_the_run(new):
    world = new()
    error = OSError("nothing there")

    class Dead:
        def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
            return world.fails(error)()

    world.runner = Dead()  # type: ignore[assignment]
    with pytest.raises(OSError, match="nothing there") as raised:
        world.run()
    assert raised.value is error
    assert world.ended_at_once()


def test_g7_a_row_that_cannot_be_asked_for_ends_the_run(new, monkeypatch):
    world = new()
    error = KeyError("no such row")
    monkeypatch.setattr(f"{__name__}.requests_of", world.fails(error))
    with pytest.raises(KeyError) as raised:
        world.run()
    assert raised.value is error
    assert world.ended_at_once()


def test_g7_even_what_is_no_exception_ends_the_run(new):
    class Odd(BaseException):
        """Neither an Exception nor one that event loops know."""

    world = new()

    async def dies(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        await asyncio.sleep(0.01)
        world.fails_now()
        raise Odd("quite odd")
        yield

    world.runner = Runner(dies)
    with pytest.raises(RuntimeError, match="quite odd"):
        world.run()
    assert world.ended_at_once()


def test_g7_a_runner_whose_own_tasks_were_cancelled_is_dead_as_well(new):
    """Nobody here cancelled it; waiting for its rollouts' deadlines would take half an hour."""
    world = new()

    async def dies(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        await asyncio.sleep(0.01)
        world.fails_now()
        raise asyncio.CancelledError
        yield

    world.runner = Runner(dies)
    with pytest.raises(RuntimeError, match="cancelled"):
        world.run()
    assert world.ended_at_once()


def test_a_setting_that_no_rollout_can_be_played_with_is_tried_once(new):
    world = new()
    error = GymConfigError("cannot be told", component="top_p")

    async def refuses(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        world.fails(error)()
        yield

    world.runner = Runner(refuses)
    with pytest.raises(GymConfigError) as raised:
        world.run()
    assert raised.value is error
    assert world.ended_at_once()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("refresh", 0), ("evaluate", 0), ("save", 0), ("groups", 0)),
        *(("train", 1), ("refresh", 1), ("evaluate", 1), ("save", 1)),
    ],
)
def test_g7_an_exception_of_the_trainers_threads_ends_the_run_at_once_as_it_was_raised(name, number, new):
    world = new(evaluate_every=1, checkpoint_every=1, save_groups_every_s=0.01, steps=2)
    error = MemoryError("no room")
    # The second step's rollouts hang: what is left to do is the trainer's alone.
    world.runner = Runner(play_of(world, lambda asked, call: world.never(asked, call) if call > 2 else None))
    fail = world.fails(error)
    world.on[name] = lambda found: fail() if found == number else None
    if name == "groups":
        world.runner = Runner(world.once_saved)
        world.on["train"] = lambda version: time.sleep(0.2)
    with pytest.raises(MemoryError) as raised:
        world.run()
    assert raised.value is error
    assert world.ended_at_once()


def test_g7_weights_that_count_backwards_end_the_run_at_once(new):
    """Seen where the step's end is told, on the event loop: not in the thread."""
    world = new()
    world.weights = 0

    def goes_back(version: int) -> None:
        world.weights -= 2
        world.fails_now()

    world.on["train"] = goes_back
    with pytest.raises(StalenessError, match="the policy must count up"):
        world.run()
    assert world.ended_at_once()


def test_g7_tokens_of_weights_that_the_policy_never_had_end_the_run(new):
    world = new()

    async def strange(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        world.fails_now()
        yield RolloutResult(requests[0], sample(requests[0], -3))

    world.runner = Runner(strange)
    with pytest.raises(StalenessError, match="older than the first of this run"):
        world.run()
    assert world.ended_at_once()


def test_what_happened_before_the_exception_still_counts_and_what_comes_after_does_not(new):
    world = new()
    error = ValueError("the end")

    async def posts() -> None:
        one = Shell(world.controller)
        one.post(RolloutEnded(0, 0, 9, None))
        one.post(error)
        one.post(RolloutEnded(0, 0, 9, None))
        await one.run(
            Begin(), SimpleNamespace(start=print, close=nothing), SimpleNamespace(close=int, carry_out=print)
        )  # type: ignore[arg-type]

    async def nothing() -> None:
        pass

    with pytest.raises(ValueError, match="the end") as raised:
        asyncio.run(posts())
    assert raised.value is error
    assert world.controller.counters.late == 1


@pytest.mark.parametrize(
    ("name", "told"), [("train", "train"), ("refresh", "publish"), ("evaluate", "evaluate"), ("save", "save")]
)
def test_a_part_that_stalls_ends_the_run_and_is_named(name, told, new, gate):
    """By a clock that runs away as soon as the part hangs: a slow machine is no stall."""
    world = new(rollout_timeout_s=600.0, stall_timeout_s=1200.0, evaluate_every=1, checkpoint_every=1)
    ahead = [0.0]
    hangs = threading.Event()

    def clock() -> float:
        ahead[0] += 5.0 * hangs.is_set()
        return time.monotonic() + ahead[0]

    world.on[name] = lambda number: number == 1 and (hangs.set(), gate.wait())
    with pytest.raises(StalledError, match=rf"nothing has happened for 12.. s: .* the trainer does {told} 1"):
        world.run(clock=clock)


def test_rollouts_that_never_end_are_failures_of_the_infrastructure_and_not_a_stall(new):
    world = new(steps=1, rollout_timeout_s=0.02, stall_timeout_s=5.0, retry=RetryPolicy(2, 0, 0.0, 0.0))
    world.runner = Runner(world.never)
    assert world.run() is False
    assert world.controller.counters.timeouts == 4 * 3
    assert world.controller.counters.infra_retries == 4 * 2
    (step,) = world.steps
    assert {type(outcome) for group in step for outcome in group.outcomes} == {Missing}
    assert len(world.runner.cancelled) == len(world.runner.asked)


# Rollouts that fail


def test_k6_a_stream_that_ends_after_5_of_8_says_so_and_the_three_are_tried_again(new):
    world = new(steps=1, prompts_per_step=1, group_size=8, max_staleness=0)
    told: list[tuple[str, str, FailureKind]] = []

    async def ends(requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        for request in requests[:2] + requests[3:6]:
            yield RolloutResult(request, sample(request, 0))

    def watch(event: Any, now: float) -> Any:
        if isinstance(event, RolloutEnded) and event.failure is not None:
            told.append((event.outcome.rollout_id, event.outcome.error, event.failure))
        return handle(event, now)

    handle, world.controller.handle = world.controller.handle, watch
    world.runner = Runner(play_of(world, lambda asked, call: ends(asked) if call == 1 else None))
    assert world.run() is False
    why = "the runner of rollouts ended after 5 of 8 results"
    assert told == [(f"train/0/{index}/0", why, FailureKind.INFRA) for index in (2, 6, 7)]
    assert sorted(world.runner.asked[1:]) == [[f"train/0/{index}/1"] for index in (2, 6, 7)]
    assert world.controller.counters.infra_retries == 3
    (outcomes,) = [group.outcomes for group in world.steps[0]]
    assert [outcome.rollout_id for outcome in outcomes] == [
        f"train/0/{index}/{int(index in (2, 6, 7))}" for index in range(8)
    ]


def test_k6_again_and_again_until_the_budget_is_gone_and_then_the_failure_is_the_outcome(new):
    world = new(steps=1, prompts_per_step=1, group_size=2, retry=RetryPolicy(2, 0, 0.0, 0.0))

    async def ends(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        if call == 1:
            yield RolloutResult(requests[0], sample(requests[0], 0))

    world.runner = Runner(ends)
    world.run()
    (group,) = world.steps[0]
    assert isinstance(group.outcomes[0], Trajectory)
    last = group.outcomes[1]
    assert isinstance(last, RolloutFailure)
    assert (last.rollout_id, last.kind, last.agent) == ("train/0/1/2", FailureKind.INFRA, "adder")
    assert last.error.endswith("after 0 of 1 results")
    assert len(world.runner.asked) == 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GymStopped("it went away"), FailureKind.INFRA),
        (GymTokenError("no tokens"), FailureKind.DATA),
        # Its text is what a server said: braces are no place to fill in.
        (GymHttpError('HTTP 500: {"detail": {0}, {}', status=500), FailureKind.INFRA),
    ],
)
def test_an_error_of_the_environment_fails_the_rollouts_that_had_no_result_yet(error, kind, new):
    world = new(steps=1, prompts_per_step=1, group_size=3, retry=RetryPolicy(0, 0, 0.0, 0.0))

    async def breaks(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        yield RolloutResult(requests[1], sample(requests[1], 0))
        raise error

    world.runner = Runner(breaks)
    assert world.run() is False
    (group,) = world.steps[0]
    assert isinstance(group.outcomes[1], Trajectory)
    for index in (0, 2):
        outcome = group.outcomes[index]
        assert isinstance(outcome, RolloutFailure)
        assert outcome.kind is kind
        assert outcome.error == f"{type(error).__name__}: {error}"


def test_results_that_nobody_asked_for_and_second_ones_do_not_count(new):
    world = new(steps=1, prompts_per_step=1)

    async def mixed(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        (other,) = requests_of(77, [Try(0, 0)])
        yield RolloutResult(other, sample(other, 0))
        yield RolloutResult(requests[1], sample(requests[1], 0))
        yield RolloutResult(requests[1], RolloutFailure("g", "r", "", FailureKind.DATA, "a second one"))
        yield RolloutResult(requests[0], sample(requests[0], 0))

    world.runner = Runner(mixed)
    assert world.run() is False
    (group,) = world.steps[0]
    assert [outcome.rollout_id for outcome in group.outcomes] == ["train/0/0/0", "train/0/1/0"]
    assert world.controller.counters == Counters()


def test_what_a_try_says_after_it_was_given_up_is_late_and_counts_for_nothing(new):
    """A runner that does not let itself be cancelled."""
    world = new(steps=1, prompts_per_step=1, group_size=1, rollout_timeout_s=0.05, stall_timeout_s=5.0)

    async def deaf(requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            yield RolloutResult(requests[0], sample(requests[0], 0))

    async def slow(requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        # Not before the other one has spoken.
        while not world.controller.counters.late:
            await asyncio.sleep(0)
        yield RolloutResult(requests[0], sample(requests[0], 0))

    world.runner = Runner(play_of(world, lambda asked, call: deaf(asked) if call == 1 else slow(asked)))
    assert world.run() is False
    assert world.controller.counters.late == 1
    (group,) = world.steps[0]
    assert group.outcomes[0].rollout_id == "train/0/0/1"


# The pump by itself


def pump_of(play: Play, versions: PublishedVersions | None = None) -> tuple[RolloutPump, Runner, list[Any]]:
    runner, posted = Runner(play), []
    return (
        RolloutPump(runner, requests_of, versions or PublishedVersions(0, 0), posted.append),
        runner,
        posted,
    )


def test_a_task_is_cancelled_with_the_last_of_its_tries_and_not_before():
    tries = (Try(0, 0), Try(1, 0), Try(2, 0))
    going = []

    async def one(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        yield RolloutResult(requests[0], sample(requests[0], 0))
        await asyncio.Event().wait()

    async def run() -> None:
        pump, runner, posted = pump_of(one)
        pump.start(Start(4, tries))
        assert pump.running == 3
        await asyncio.sleep(0.01)
        assert [(event.position, event.index, event.number) for event in posted] == [(4, 0, 0)]
        assert pump.running == 2
        # What has ended, was cancelled before or never was, is nobody's last.
        pump.cancel(Cancel(4, (tries[0], Try(1, 5))))
        pump.cancel(Cancel(5, (tries[1],)))
        pump.cancel(Cancel(4, (tries[1],)))
        pump.cancel(Cancel(4, (tries[1],)))
        await asyncio.sleep(0.01)
        going.append(len(runner.cancelled))
        pump.cancel(Cancel(4, (tries[2],)))
        await asyncio.sleep(0.01)
        going.append(len(runner.cancelled))
        assert pump.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(posted) == 1, "a try that was given up has no end"
        await pump.close()

    asyncio.run(run())
    assert going == [0, 1]


def test_the_end_of_the_pump_is_the_end_of_all_its_tries_and_is_told_to_nobody():
    async def hang(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        await asyncio.Event().wait()
        yield

    async def run() -> None:
        pump, runner, posted = pump_of(hang)
        for position in range(3):
            pump.start(Start(position, (Try(0, 0), Try(1, 0))))
        await asyncio.sleep(0)
        await pump.close()
        assert len(runner.cancelled) == 3
        assert pump.running == 0
        assert posted == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await pump.close()

    asyncio.run(run())


def test_a_rollout_is_as_old_as_its_oldest_token_and_as_new_as_its_newest_those_of_forks_included():
    versions = PublishedVersions(10, 3)
    versions.publish(12)
    versions.publish(13)

    async def play(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        fork = sample(requests[1], 13)
        yield RolloutResult(requests[0], sample(requests[0], 12, 12))
        yield RolloutResult(requests[1], sample(requests[1], 12, forks=(sample(requests[1], 10), fork)))
        yield RolloutResult(requests[2], sample(requests[2]))

    async def run() -> list[Any]:
        pump, _, posted = pump_of(play, versions)
        pump.start(Start(0, (Try(0, 0), Try(1, 0), Try(2, 0))))
        await asyncio.sleep(0.01)
        await pump.close()
        return posted

    found = asyncio.run(run())
    assert [(event.oldest, event.newest) for event in found] == [(4, 4), (3, 5), (None, None)]
    assert all(event.failure is None for event in found)


def test_a_stream_whose_result_ends_the_run_is_closed_there_and_then():
    """And not when the garbage collector finds it: what it has started would play on."""
    closed: list[str] = []
    kept: list[AsyncIterator[RolloutResult]] = []

    async def play(requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        try:
            yield RolloutResult(requests[0], sample(requests[0], -1))
        finally:
            closed.append("closed")

    class Keeps:
        def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
            kept.append(play(requests))
            return kept[0]

    async def run() -> None:
        posted: list[Any] = []
        pump = RolloutPump(Keeps(), requests_of, PublishedVersions(0, 0), posted.append)
        pump.start(Start(0, (Try(0, 0),)))
        await asyncio.sleep(0.01)
        assert [type(happened) for happened in posted] == [StalenessError]
        assert closed == ["closed"]

    asyncio.run(run())


def work_of(world: World, then: Callable[[TrainPump, list[Any]], Any]) -> list[Any]:
    """What a pump of the trainer posts while ``then`` has it do things."""
    posted: list[Any] = []

    async def run() -> None:
        parts: dict[str, Any] = {"trainer": world, "policy": world, "groups": world}
        pump = TrainPump(**parts, refresh=world.refresh, versions=world.versions, post=posted.append)
        try:
            async with asyncio.timeout(LIMIT_S):
                await then(pump, posted)
        finally:
            pump.close()

    asyncio.run(run())
    return posted


def test_the_snapshot_of_a_checkpoint_is_taken_before_anything_else_can_happen(new):
    world = new()
    taken: list[str] = []

    def snapshot() -> Snapshot:
        taken.append(threading.current_thread().name)
        return Snapshot(next_position=7)

    async def then(pump: TrainPump, posted: list[Any]) -> None:
        pump.carry_out(Save(0), snapshot, Counters())
        assert taken == [threading.current_thread().name]
        while not posted:
            await asyncio.sleep(0.001)

    assert work_of(world, then) == [Saved(0)]
    assert world.snapshots == [Snapshot(next_position=7)]
    assert len(taken) == 1


def test_a_step_waits_for_weights_that_are_being_handed_over_again(new, gate):
    """The policy is one thing; nobody trains it while it is read."""
    world = new()
    world.on["refresh"] = lambda number: gate.wait(LIMIT_S)

    async def then(pump: TrainPump, posted: list[Any]) -> None:
        assert not pump.busy
        pump.revive()
        assert pump.busy
        pump.carry_out(Train(1, ()), Snapshot, Counters())
        await asyncio.sleep(0.05)
        assert world.calls("train") == []
        gate.set()
        while not posted:
            await asyncio.sleep(0.001)
        assert not pump.busy

    assert work_of(world, then) == [Trained(1)]
    assert world.did == [("refresh", 0), ("train", 1)]


# Stops


class Signal:
    """Comes while a step is trained, which goes on until the shell has seen it."""

    def __init__(self, world: World, version: int) -> None:
        self._came, self._seen = threading.Event(), threading.Event()
        world.on["train"] = lambda number: number == version and self._come()

    def _come(self) -> None:
        self._came.set()
        assert self._seen.wait(LIMIT_S), "nobody looked"
        time.sleep(0.05)

    def __call__(self) -> bool:
        if self._came.is_set():
            self._seen.set()
        return self._came.is_set()


def test_a_stop_lets_the_step_end_saves_it_and_gives_rollouts_up(new):
    world = new(steps=9)
    assert world.run(should_stop=Signal(world, 2), grace_s=30.0) is True
    assert world.calls("train") == [1, 2]
    assert world.calls("save") == [0, 2]
    assert world.snapshots[-1].version == 2
    assert world.snapshots[-1].trained.below == 4
    assert world.calls("refresh") == [0, 1], "weights that nobody will sample from are not handed over"


def test_a_stop_while_rollouts_hang_is_done_at_once(new):
    world = new()
    world.runner = Runner(world.never)
    began = time.monotonic()
    assert world.run(should_stop=lambda: world.calls("save") == [0]) is True
    assert time.monotonic() - began < LIMIT_S / 2
    assert world.calls("train") == []
    assert world.calls("save") == [0], "there was nothing new to save"
    assert len(world.runner.cancelled) == 4


def test_a_stop_before_anything_was_saved_leaves_something_to_resume(new):
    world = new()
    world.runner = Runner(world.never)
    assert world.run(should_stop=lambda: True, grace_s=30.0) is True
    assert world.calls("save") == [0]


def test_a_run_that_is_done_when_it_is_asked_to_stop_is_done(new):
    world = new(steps=1)
    assert world.run(should_stop=Signal(world, 1)) is False, "its last step was being trained"
    assert world.calls("save") == [0, 1]


def test_when_the_grace_is_over_nobody_is_waited_for(new, gate):
    world = new()
    training = threading.Event()
    world.on["train"] = lambda version: (training.set(), gate.wait())
    began = time.monotonic()
    with pytest.raises(GraceOver, match=r"no safe point within the grace: .* the trainer does train 1"):
        world.run(should_stop=training.is_set, grace_s=0.3)
    assert 0.3 < time.monotonic() - began < LIMIT_S / 2


def test_without_a_grace_a_stop_takes_as_long_as_it_takes(new):
    world = new(steps=1)
    assert world.run(should_stop=Signal(world, 1), grace_s=None) is False


def test_the_grace_is_counted_from_the_first_yes_which_is_asked_for_once(new, gate):
    """By the clock of the shell, not by how often somebody looks."""
    world = new()
    now = [0.0]
    answers: list[float] = []

    def stop() -> bool:
        answers.append(now[0])
        return True

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    world.on["refresh"] = lambda version: gate.wait()
    with pytest.raises(GraceOver):
        world.run(should_stop=stop, grace_s=20.0, clock=clock)
    assert len(answers) == 1
    assert 20.0 <= now[0] - answers[0] <= 40.0


# Weights, again


def test_replicas_that_are_back_are_given_the_present_weights_while_the_policy_has_nothing_to_do(
    new, monkeypatch
):
    monkeypatch.setattr(shell, "_REVIVE_EVERY_S", 0.02)
    world = new(steps=1)

    async def waits(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        while world.refreshed < 4:
            await asyncio.sleep(0.01)
        async for result in world.at_once(requests, call):
            yield result

    world.runner = Runner(waits)
    assert world.run() is False
    assert set(world.calls("refresh")) == {0, 1}
    assert world.calls("refresh").count(0) >= 4


def test_and_not_while_it_has(new, monkeypatch):
    monkeypatch.setattr(shell, "_REVIVE_EVERY_S", 0.02)
    world = new(steps=1)
    seen: list[int] = []
    world.on["train"] = lambda version: (time.sleep(0.3), seen.append(world.refreshed))
    before: list[int] = []
    train = world.train

    def watched(*args: Any) -> None:
        before.append(world.refreshed)
        train(*args)

    monkeypatch.setattr(world, "train", watched)
    world.run()
    assert seen == before
    # Nothing was queued behind the step either, but the weights that it led to.
    behind = world.did[world.did.index(("train", 1)) + 1 :]
    assert behind[: behind.index(("evaluate", 1))] == [("refresh", 1)]


def test_an_engine_that_cannot_take_the_weights_back_ends_the_run(new, monkeypatch):
    monkeypatch.setattr(shell, "_REVIVE_EVERY_S", 0.02)
    world = new()
    world.runner = Runner(world.never)
    error = RuntimeError("all replicas are gone")
    fail = world.fails(error)
    world.on["refresh"] = lambda version: fail() if world.refreshed > 1 else None
    with pytest.raises(RuntimeError, match="all replicas") as raised:
        world.run()
    assert raised.value is error
    assert world.ended_at_once()


# Finished groups on disk


def test_finished_groups_are_written_beside_the_checkpoint_that_they_belong_to_and_older_ones_forgotten(new):
    world = new(steps=2, save_groups_every_s=0.01, checkpoint_every=1)
    written: list[tuple[int, list[int]]] = []
    write = world.write
    world.runner = Runner(world.once_saved)

    def watched(anchor: int, groups: Sequence[Group]) -> None:
        write(anchor, groups)
        written.append((anchor, [group.position for group in groups]))

    world.write = watched  # type: ignore[method-assign]
    world.on["train"] = lambda version: time.sleep(0.1)
    assert world.run() is False
    assert {anchor for anchor, _ in written} == {0}, "those of the second checkpoint are in it"
    assert sorted(position for _, positions in written for position in positions) == [0, 1, 2, 3]
    assert world.calls("keep") in ([0, 1, 2], [0, 1]), "the last one may have been too late"
    assert world.did.index(("keep", 1)) > world.did.index(("groups", 0))


# After the end


def test_a_thread_that_ends_after_the_event_loop_says_nothing(new, gate, caplog):
    """A traceback of a closed event loop would hide what really ended the run."""
    world = new()
    threads: list[threading.Thread] = []
    world.on["train"] = lambda version: (threads.append(threading.current_thread()), gate.wait())
    with pytest.raises(GraceOver):
        world.run(should_stop=lambda: bool(threads), grace_s=0.05)
    gate.set()
    threads[0].join(5.0)
    assert not threads[0].is_alive()
    assert caplog.records == []


def run_the_job(world: World, said: list[str], *, grace_s: float, **stop: Any) -> bool:
    """What an asynchronous run does with as much of a job as it touches."""
    job: Any = SimpleNamespace(
        runtime=SimpleNamespace(policy=world, engine=SimpleNamespace(refresh=world.refresh)),
        stop=SimpleNamespace(**stop),
        say=said.append,
    )
    parts: Any = (world.controller, world, world.runner, requests_of, world)
    config: Any = SimpleNamespace(async_=SimpleNamespace(grace_s=grace_s))
    return asyncio.run(asynchronous._run(job, *parts, Begin(), config))


def test_a_rollout_that_waits_for_the_engine_in_a_thread_does_not_hold_up_the_end(new, gate):
    """The engine answers, or is ended, when the job is: behind this."""
    world = new()
    error = ValueError("the end")

    async def hangs(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        await asyncio.to_thread(gate.wait, LIMIT_S)
        yield

    world.runner = Runner(hangs)
    world.on["save"] = world.fails(error)
    began = time.monotonic()
    with pytest.raises(ValueError, match="the end") as raised:
        run_the_job(world, [], grace_s=10.0, requested=False)
    assert raised.value is error
    assert time.monotonic() - began < LIMIT_S / 2


def test_every_rollout_that_may_be_played_has_a_thread_to_wait_in(new):
    """A pool of as many threads as there are cores would let four of these wait for the fifth."""
    world = new(steps=1, prompts_per_step=40, group_size=1)
    together = threading.Barrier(40)

    async def waits(requests: Sequence[RolloutRequest], call: int) -> AsyncIterator[RolloutResult]:
        await asyncio.to_thread(together.wait, LIMIT_S)
        async for result in world.at_once(requests, call):
            yield result

    world.runner = Runner(waits)
    assert run_the_job(world, [], grace_s=10.0, requested=False) is False
    assert world.trained == [list(range(40))]


class Stopped(BaseException):
    """In place of what the command line ends with."""


def test_a_stop_that_takes_too_long_ends_the_command_as_a_stop(new, gate, monkeypatch):
    """And leaves a share of the grace for the end of the processes."""
    world = new()
    said: list[str] = []
    graces: list[float | None] = []

    class Watched(Shell):
        def __init__(self, controller: Controller, **options: Any) -> None:
            graces.append(options["grace_s"])
            super().__init__(controller, **options)

    monkeypatch.setattr(asynchronous, "Shell", Watched)
    world.on["refresh"] = lambda version: gate.wait()
    with pytest.raises(Stopped, match="the last checkpoint is what there is") as stopped:
        run_the_job(world, said, grace_s=0.4, requested=True, interrupted=Stopped)
    assert isinstance(stopped.value.__cause__, GraceOver)
    assert said == [f"stopped    {stopped.value.__cause__}"]
    assert graces == [pytest.approx(0.24)]
