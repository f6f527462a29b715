"""The controller by hand: one event after the other, on a clock that the test sets.

The names of tests begin with the public fault that they are about (BUGS, areas A, G, H, K, M).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rl_algorithms.controller import (
    Abort,
    Begin,
    Cancel,
    Command,
    Controller,
    ControllerError,
    ControllerSettings,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    GroupsSaved,
    Publish,
    Published,
    ReadyFirst,
    RetryPolicy,
    RolloutEnded,
    Save,
    Saved,
    SaveGroups,
    Snapshot,
    Start,
    StopRequested,
    Tick,
    Train,
    Trained,
)
from rl_algorithms.replay import Group, Missing, PositionSet
from rl_gym_bridge.trajectory import FailureKind

INFRA, DATA = FailureKind.INFRA, FailureKind.DATA
NO_DELAY = RetryPolicy(first_delay_s=0.0, longest_delay_s=0.0)


def settings(**changes: Any) -> ControllerSettings:
    values: dict[str, Any] = {"steps": 4, "prompts_per_step": 2, "group_size": 1, "max_staleness": 1}
    return ControllerSettings(**(values | changes))


@dataclass
class Hand:
    """A controller, and the world as far as a test moves it; all but rollouts and training takes no time."""

    controller: Controller
    now: float = 0.0
    log: list[Command] = field(default_factory=list)
    running: dict[tuple[int, int], int] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)
    training: Train | None = None
    snapshot: Snapshot | None = None
    groups: list[Group] = field(default_factory=list)

    @classmethod
    def of(cls, own: ControllerSettings, *, at: Snapshot | None = None, groups: Sequence[Group] = ()) -> Hand:
        hand = cls(Controller(own, at, groups))
        hand.give(Begin(measured=at is not None, saved=at is not None))
        return hand

    def give(self, event: Event) -> list[Command]:
        commands = self.controller.handle(event, self.now)
        self.log += commands
        for command in commands:
            match command:
                case Start(position, tries):
                    self.running |= {(position, one.index): one.number for one in tries}
                case Cancel(position, tries):
                    for one in tries:
                        self.running.pop((position, one.index), None)
                case Train():
                    self.training = command
                case Publish(version):
                    self.give(Published(version))
                case Evaluate(version):
                    self.give(Evaluated(version))
                case Save(version):
                    self.snapshot = self.controller.snapshot()
                    self.groups = []
                    self.give(Saved(version))
                case SaveGroups(_, groups):
                    self.groups += groups
                    self.give(GroupsSaved())
                case Finish() | Abort():
                    pass
        return commands

    def end(
        self, position: int, index: int = 0, *, failure: FailureKind | None = None, **versions: int
    ) -> None:
        number = self.running.pop((position, index))
        self.give(RolloutEnded(position, index, number, f"{position}/{index}", failure=failure, **versions))

    def end_all(self, positions: Iterable[int] | None = None) -> None:
        for position, index in sorted(self.running):
            if positions is None or position in positions:
                self.end(position, index)

    def train(self) -> list[int]:
        assert self.training is not None, self.controller.describe()
        task, self.training = self.training, None
        positions = [group.position for group in task.groups]
        self.steps.append(positions)
        self.give(Trained(task.version))
        return positions

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (timer := self.controller.next_timer()) is not None and timer <= until:
            self.now = max(timer, self.now)
            self.give(Tick())
        self.now = until
        self.give(Tick())

    def to_the_end(self) -> list[list[int]]:
        for _ in range(10_000):
            if self.controller.over:
                return self.steps
            if self.training is not None:
                self.train()
            elif self.running:
                self.end_all()
            else:
                self.wait(1.0)
        raise AssertionError(self.controller.describe())

    @property
    def positions(self) -> list[int]:
        return sorted({position for position, _ in self.running})


def ready(*positions: int, version: int) -> tuple[Group, ...]:
    return tuple(Group(p, ("kept",), oldest=version, newest=version, order=p) for p in positions)


def test_it_begins_with_weights_a_measurement_and_a_checkpoint_and_starts_what_staleness_allows():
    hand = Hand.of(settings())
    kinds = [type(command) for command in hand.log]
    assert kinds == [Publish, *[Start] * 4, Evaluate, Save]
    assert hand.positions == [0, 1, 2, 3]
    assert hand.controller.capacity == 0


def test_steps_are_trained_in_order_and_rows_follow_the_weights():
    hand = Hand.of(settings())
    hand.end_all([2, 3, 1])
    assert hand.training is None, "row 0 is missing"
    hand.end_all([0])
    assert hand.train() == [0, 1]
    assert hand.positions == [4, 5]
    assert hand.train() == [2, 3]
    assert hand.to_the_end() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert hand.log[-1] == Finish(stopped=False)


def test_without_staleness_rollouts_and_training_take_turns():
    hand = Hand.of(settings(max_staleness=0))
    assert hand.positions == [0, 1]
    hand.end_all()
    assert hand.positions == []
    hand.train()
    assert hand.positions == [2, 3]


@pytest.mark.parametrize(("epochs_rows", "steps"), [(6 * 10**6, 8), (2 * 6, 6)])
def test_a7_rows_are_drawn_through_epochs_until_the_steps_or_the_epochs_are_done(epochs_rows, steps):
    """Six rows, two per step: the steps are counted before the first, so nobody waits at the end."""
    hand = Hand.of(settings(steps=min(8, epochs_rows // 2)))
    assert len(hand.to_the_end()) == steps
    assert hand.now == 0.0, "it never had to wait"


def test_g4_a_full_batch_at_a_resume_is_trained_and_the_next_steps_are_begun():
    at = Snapshot(
        version=30, next_position=248, trained=PositionSet(240), ready=ready(*range(240, 248), version=30)
    )
    hand = Hand.of(settings(steps=33, prompts_per_step=8), at=at)
    assert hand.positions == list(range(248, 256)), "one step ahead, no more and no less"
    assert hand.train() == list(range(240, 248))
    assert hand.positions == list(range(248, 264)), "and the one after it"
    assert [len(step) for step in hand.to_the_end()] == [8, 8, 8]
    assert hand.steps[1:] == [list(range(248, 256)), list(range(256, 264))]


def test_g5_a_worker_that_dies_before_it_starts_leaks_no_reservation():
    hand = Hand.of(settings(steps=1, prompts_per_step=4, max_staleness=0, retry=NO_DELAY))
    hand.end(0)
    for _ in range(3):
        for position in (1, 2, 3):
            hand.end(position, failure=INFRA)
        hand.wait(0.1)
    assert hand.controller.running == 3
    assert hand.positions == [1, 2, 3]
    hand.to_the_end()
    assert hand.steps == [[0, 1, 2, 3]]
    assert hand.controller.running == 0


@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_g6_a_rollout_that_never_ends_does_not_hold_up_its_step(policy):
    own = settings(
        steps=2,
        prompts_per_step=4,
        group_size=4,
        straggler=policy,
        straggler_timeout_s=10.0,
        min_batch_fraction=0.75,
        stall_timeout_s=1e6,
        rollout_timeout_s=1e5,
    )
    hand = Hand.of(own)
    for position, index in sorted(hand.running):
        if (position, index) != (2, 1):
            hand.end(position, index)
    assert hand.training is None
    hand.wait(9.0)
    assert hand.training is None
    hand.wait(3.0)
    assert hand.training is not None, "by its deadline and two seconds"
    trained = {group.position: group for group in hand.training.groups}
    if policy == "replace":
        assert sorted(trained) == [0, 1, 3, 4], "the next row takes its place"
        assert hand.running[2, 1] == 1, "what is missing is played again"
        assert (2, 0) not in hand.running, "what is there is kept"
        assert hand.controller.counters.straggler_rows == 1
    else:
        assert sorted(trained) == [0, 1, 2, 3]
        assert trained[2].outcomes[0] == "2/0"
        assert isinstance(trained[2].outcomes[1], Missing)
        assert trained[2].stragglers == hand.controller.counters.stragglers == 1
        assert (2, 1) not in hand.running, "nobody waits for it any more"


def test_g6_a_step_is_not_shrunk_below_the_fraction():
    own = settings(
        steps=1, prompts_per_step=4, straggler="shrink", straggler_timeout_s=10.0, min_batch_fraction=0.75
    )
    hand = Hand.of(own)
    hand.end(0)
    hand.end(3)
    hand.wait(100.0)
    assert hand.training is None, "half of the step has ended"
    hand.end(1)
    assert hand.training is not None, "three quarters have"
    assert hand.train() == [0, 1, 2, 3]


def test_g6_a_step_is_shrunk_as_soon_as_enough_of_an_overdue_group_has_ended():
    own = settings(
        steps=1,
        prompts_per_step=1,
        group_size=4,
        max_staleness=0,
        straggler="shrink",
        straggler_timeout_s=10.0,
        min_batch_fraction=0.75,
    )
    hand = Hand.of(own)
    hand.end(0, 0)
    hand.end(0, 1)
    hand.wait(12.0)
    assert hand.training is None, "half of its rollouts have ended"
    hand.end(0, 2)
    assert hand.training is not None, "three quarters have"
    assert hand.training.groups[0].stragglers == 1


def test_g6_and_again_after_a_resume():
    own = settings(steps=1, prompts_per_step=2, straggler="shrink", straggler_timeout_s=10.0)
    hand = Hand.of(own)
    hand.end(0)
    hand.give(StopRequested())
    again = Hand.of(own, at=replace(hand.controller.snapshot()))
    assert again.positions == [1]
    again.wait(12.0)
    assert again.train() == [0, 1]


def test_a_row_that_is_replaced_too_often_is_closed_with_what_it_has():
    own = settings(
        steps=1, straggler="replace", straggler_timeout_s=10.0, max_replays=2, rollout_timeout_s=5e3
    )
    hand = Hand.of(own)
    hand.end(0)
    hand.wait(10.5)
    hand.wait(10.5)
    assert hand.training is None
    hand.wait(10.5)
    assert hand.train() == [0, 1]
    assert hand.controller.counters.straggler_rows == 2
    assert hand.controller.counters.stragglers == 1


def test_g8_a_group_that_was_too_old_pins_no_index_and_is_trained_after_all():
    own = settings(steps=75, sampler=ReadyFirst(), checkpoint_every=1)
    hand = Hand.of(own)
    while hand.controller.version < 3:
        hand.end_all(set(hand.positions) - {2})
        hand.train()
    assert hand.controller.counters.stale_rows >= 1, "row 2 grew too old"
    assert hand.running[2, 0] >= 1, "and is played again"
    hand.give(RolloutEnded(2, 0, 0, "late"))
    assert hand.controller.counters.late == 1
    trained = sorted(position for step in hand.to_the_end() for position in step)
    assert trained == list(range(150))
    assert hand.snapshot is not None
    assert (hand.snapshot.trained.below, hand.snapshot.trained.beyond) == (150, [])


def test_a_row_that_grows_too_old_again_and_again_is_waited_for():
    hand = Hand.of(settings(steps=50, sampler=ReadyFirst(), max_replays=2))
    for _ in range(40):
        hand.end_all(set(hand.positions) - {2})
        if hand.training is None:
            break
        hand.train()
    assert hand.controller.counters.stale_rows == 2
    assert hand.training is None, "it does without no more"
    hand.end(2)
    assert 2 in [g.position for g in hand.training.groups]


def test_g9_training_never_runs_ahead_of_the_bound():
    hand = Hand.of(settings(steps=12, sampler=ReadyFirst()))
    step = 0
    while not hand.controller.over:
        if hand.training is not None:
            assert all(group.oldest >= hand.training.version - 1 - 1 for group in hand.training.groups)
            hand.train()
        else:
            # Slow, and out of order.
            step += 1
            hand.end(hand.positions[-1] if step % 3 else hand.positions[0])
    assert len(hand.steps) == 12


def test_g10_finished_groups_survive_a_resume_also_where_steps_go_in_order():
    at = Snapshot(version=1, next_position=8, trained=PositionSet(2), ready=ready(2, 3, 5, 7, version=1))
    hand = Hand.of(settings(steps=5, checkpoint_every=1), at=at)
    assert hand.controller.ready == 2, "and two are being trained"
    assert hand.train() == [2, 3]
    assert hand.positions[:2] == [4, 6], "only what is missing is played"
    kept = [group for command in hand.log if isinstance(command, Train) for group in command.groups]
    assert [g.outcomes for g in kept] == [("kept",), ("kept",)]


def test_h1_a_resume_goes_on_behind_what_was_trained_not_behind_what_was_begun():
    hand = Hand.of(settings(steps=4, checkpoint_every=1))
    hand.end_all([0, 1])
    hand.train()
    assert hand.snapshot is not None
    assert hand.snapshot.next_position > 2
    again = Hand.of(settings(steps=4), at=Snapshot.from_json(hand.snapshot.to_json(), hand.snapshot.ready))
    assert again.to_the_end() == [[2, 3], [4, 5], [6, 7]]


def test_h2_rows_in_flight_finished_and_never_begun_are_each_trained_once():
    own = settings(
        steps=4, prompts_per_step=4, sampler=ReadyFirst(), max_staleness=2, save_groups_every_s=1.0
    )
    hand = Hand.of(replace(own, checkpoint_every=1))
    hand.end_all([0, 1, 2, 3])
    hand.train()
    hand.end_all([5, 7])
    hand.wait(1.5)
    assert hand.snapshot is not None
    assert [group.position for group in hand.groups] == [5, 7], (
        "finished after the checkpoint, saved beside it"
    )
    again = Hand.of(own, at=hand.snapshot, groups=hand.groups)
    assert 5 not in again.positions
    assert 7 not in again.positions
    again.to_the_end()
    assert sorted(p for step in (*hand.steps, *again.steps) for p in step) == list(range(16))


def test_h3_a_resume_on_the_boundary_of_an_epoch_goes_on():
    at = Snapshot(version=60, next_position=120, trained=PositionSet(120))
    hand = Hand.of(settings(steps=120), at=at)
    assert len(hand.to_the_end()) == 60


def test_h12_the_first_row_after_a_resume_is_the_next_one():
    at = Snapshot(version=3, next_position=6, trained=PositionSet(6))
    assert Hand.of(settings(steps=9), at=at).positions == [6, 7, 8, 9]


def test_m5_retries_of_rollouts_and_replays_of_rows_are_counted_apart():
    own = settings(
        steps=30, sampler=ReadyFirst(), retry=NO_DELAY, straggler="replace", straggler_timeout_s=50.0
    )
    hand = Hand.of(own)
    hand.end(0, failure=INFRA)
    hand.wait(0.1)
    hand.end(0, failure=INFRA)
    hand.wait(0.1)
    hand.end(1, failure=DATA)
    hand.wait(0.1)
    hand.end_all([0, 1, 2])
    hand.train()
    for _ in range(3):
        hand.wait(51.0)
    counters = hand.controller.counters
    assert (counters.infra_retries, counters.data_retries) == (2, 1)
    straggled = {command.position for command in hand.log if isinstance(command, Cancel)}
    assert counters.straggler_rows == 3 * len(straggled)
    assert counters.timeouts == counters.stragglers == 0


@pytest.mark.parametrize(("kind", "tries"), [(INFRA, 6), (DATA, 3)])
def test_a_rollout_is_tried_again_within_the_budget_of_its_kind_and_then_its_failure_is_its_outcome(
    kind, tries
):
    hand = Hand.of(settings(steps=1))
    hand.end(1)
    began = hand.now
    for _ in range(tries):
        assert hand.training is None
        hand.end(0, failure=kind)
        hand.wait(31.0)
    assert hand.training is not None
    assert {group.position: group.outcomes for group in hand.training.groups}[0] == ("0/0",)
    starts = [c for c in hand.log if isinstance(c, Start) and c.position == 0]
    assert [one.number for c in starts for one in c.tries] == list(range(tries))
    assert hand.now - began >= 31.0 * tries


def test_delays_double_up_to_the_longest_and_jitter_shortens_them():
    policy = RetryPolicy(first_delay_s=1.0, longest_delay_s=30.0, jitter=0.25)
    for failures, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (6, 30.0), (500, 30.0)):
        found = [policy.delay_s(failures, key) for key in range(50)]
        assert all(0.75 * longest <= delay <= longest for delay in found)
        assert len(set(found)) > 40
        assert found == [policy.delay_s(failures, key) for key in range(50)]


def test_a_rollout_that_takes_too_long_has_failed_and_what_it_says_later_does_not_count():
    hand = Hand.of(settings(steps=1, rollout_timeout_s=20.0, stall_timeout_s=300.0))
    hand.end(1)
    hand.wait(21.0)
    assert hand.controller.counters.timeouts == 1
    assert Cancel(0, (next(c for c in hand.log if isinstance(c, Start)).tries[0],)) in hand.log
    hand.give(RolloutEnded(0, 0, 0, "late"))
    assert hand.controller.counters.late == 1
    assert hand.training is None
    hand.wait(2.0)
    hand.end(0)
    assert [g.outcomes for g in hand.training.groups] == [("0/0",), ("1/0",)]


def test_a_stall_ends_the_run_and_says_what_everything_waits_for():
    hand = Hand.of(settings(stall_timeout_s=100.0, rollout_timeout_s=99.0))
    hand.end_all()
    hand.wait(99.0)
    assert not hand.controller.over, "training may take its time"
    hand.wait(150.0)
    abort = hand.log[-1]
    assert isinstance(abort, Abort)
    assert "the trainer does train 1" in abort.reason
    assert hand.controller.next_timer() is None
    assert hand.give(Trained(1)) == []


def test_time_in_which_nobody_was_there_counts_for_no_deadline():
    hand = Hand.of(settings(straggler="replace", straggler_timeout_s=60.0))
    hand.now += 1e6
    hand.give(Tick())
    assert hand.controller.counters.straggler_rows == 0
    assert not hand.controller.over
    assert hand.controller.counters.overslept_s == pytest.approx(1e6 - 10.0)
    hand.now -= 3e6
    hand.give(Tick())
    hand.wait(51.0)
    assert hand.controller.counters.straggler_rows > 0, "time goes on where it was"


def test_a_stop_gives_up_rollouts_lets_the_step_end_and_saves_it():
    hand = Hand.of(settings())
    hand.end_all([0, 1])
    assert hand.training is not None
    hand.give(StopRequested())
    assert not hand.running
    assert not hand.controller.over
    hand.train()
    assert hand.log[-2:] == [Save(1), Finish(stopped=True)]
    assert hand.snapshot is not None
    assert hand.snapshot.version == 1
    assert Hand.of(settings(), at=hand.snapshot).to_the_end() == [[2, 3], [4, 5], [6, 7]]


def test_a_stop_between_steps_saves_what_is_not_saved_yet_and_once_only():
    hand = Hand.of(settings(checkpoint_every=1))
    hand.end_all([0, 1])
    hand.train()
    hand.give(StopRequested())
    assert hand.log[-1] == Finish(stopped=True)
    assert sum(isinstance(command, Save) for command in hand.log) == 2, "step 0 and step 1"


def test_an_evaluation_that_is_good_enough_ends_the_run_with_a_checkpoint():
    controller = Controller(settings(evaluate_every=1))
    controller.handle(Begin(measured=True, saved=True), 0.0)
    controller.handle(Published(0), 0.0)
    for position in range(2):
        commands = controller.handle(RolloutEnded(position, 0, 0, "sample"), 0.0)
    assert isinstance(commands[-1], Train)
    assert controller.handle(Trained(1), 0.0)[-1] == Publish(1)
    assert controller.handle(Published(1), 0.0)[-1] == Evaluate(1)
    assert controller.handle(Evaluated(1, reached=True), 0.0)[-1] == Save(1)
    assert controller.handle(Saved(1), 0.0)[-1] == Finish(stopped=False)


def test_finished_groups_of_weights_that_the_checkpoint_has_not_seen_are_not_kept():
    groups = [*ready(2, version=1), *ready(3, version=2)]
    at = Snapshot(version=1, next_position=4, trained=PositionSet(2))
    hand = Hand.of(settings(), at=at, groups=groups)
    assert hand.controller.ready == 1
    assert hand.controller.counters.discarded_groups == 1
    assert 3 in hand.positions


def test_counters_and_histories_go_on_after_a_resume():
    hand = Hand.of(settings(retry=NO_DELAY))
    for _ in range(3):
        hand.end(0, failure=INFRA)
        hand.wait(0.1)
    saved = Snapshot.from_json(hand.controller.snapshot().to_json())
    assert saved == hand.controller.snapshot()
    again = Hand.of(settings(retry=NO_DELAY), at=replace(saved, counters=replace(saved.counters)))
    assert again.controller.counters.infra_retries == 3
    assert again.running[0, 0] == 4, "four tries were begun before"
    for _ in range(2):
        again.end(0, failure=INFRA)
        again.wait(0.1)
    assert again.running[0, 0] == 6
    again.end(0, failure=INFRA)
    assert (0, 0) not in again.running, "five retries in all"


@pytest.mark.parametrize(
    "chosen", [[0], [0, 0], [0, 99], [0, 1, 2]], ids=["too few", "one twice", "unknown", "too many"]
)
def test_a_sampler_is_held_to_its_contract(chosen):
    class Odd:
        def choose(self, ready, running, count):
            return chosen if len(ready) >= 3 else None

    hand = Hand.of(settings(sampler=Odd()))
    with pytest.raises(ControllerError, match=r"Odd chose .*; a sampler gives exactly 2 of their positions"):
        hand.end_all([0, 1, 2])


@pytest.mark.parametrize("event", [Trained(1), Published(3), Evaluated(0), Saved(0)])
def test_events_that_cannot_have_happened_are_refused(event):
    hand = Hand.of(settings())
    with pytest.raises(ControllerError, match="but it waits for groups"):
        hand.give(event)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"max_staleness": -1}, "max_staleness must be >= 0"),
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"min_batch_fraction": 0.0}, r"min_batch_fraction must lie in \(0, 1\]"),
        ({"straggler_timeout_s": float("inf")}, "straggler_timeout_s must be a finite number"),
        ({"save_groups_every_s": 0.0}, "save_groups_every_s must be a finite number"),
        ({"stall_timeout_s": 10.0, "rollout_timeout_s": 10.0}, "must exceed rollout_timeout_s"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        settings(**changes)
