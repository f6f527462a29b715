"""The training half of an asynchronous run, call by call, on the small policy that really learns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_algorithms.advantages import GroupRelative
from rl_algorithms.checkpoint_files import CheckpointCorruptError
from rl_algorithms.checkpointing import CheckpointStore
from rl_algorithms.controller import Counters, Snapshot, SnapshotError
from rl_algorithms.controller.snapshot import RolloutHistory, RowHistory
from rl_algorithms.loops import LoopError, LoopSettings
from rl_algorithms.loops.asynchronous import AsyncTrainer, check_asynchronous, resume_controller
from rl_algorithms.loops.state import LoopState, StepReport
from rl_algorithms.losses import ClippedPGLoss
from rl_algorithms.method import Method
from rl_algorithms.replay import Group, Missing, PositionSet
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

SETTINGS = LoopSettings(steps=8, prompts_per_step=2, group_size=2, learning_rate=0.1, max_infra_failures=0)
METHOD = Method(GroupRelative(), ClippedPGLoss(clip_high=0.28))
IDENTITY = {"rows": 6, "rows_digest": "d", "prompts_per_step": 2, "group_size": 2, "seed": 0}
UNIFORM = -math.log(14)


def rollout(position: int, index: int, *, reward: float | None = None) -> Trajectory:
    """Its prompt says which position it is of; its answer and its reward are those of the index."""
    return Trajectory(
        turns=(Turn((13, position), (index,), (UNIFORM,)),),
        reward=float(index) if reward is None else reward,
        stop_reason=StopReason.STOP,
        group_id=f"train/{position}",
        rollout_id=f"train/{position}/{index}",
    )


def failed(position: int, index: int, kind: FailureKind = FailureKind.INFRA) -> RolloutFailure:
    return RolloutFailure(f"train/{position}", f"train/{position}/{index}", "adder", kind, "it went away")


def group(position: int, *outcomes: Any, oldest: int = 0, newest: int = 0, stragglers: int = 0) -> Group:
    found = outcomes or (rollout(position, 0), rollout(position, 1))
    return Group(position, found, oldest=oldest, newest=newest, order=position, stragglers=stragglers)


class Trained:
    """A trainer, and all that it told."""

    def __init__(self, world: Any, settings: LoopSettings = SETTINGS, **options: Any) -> None:
        self.world = world
        self.reports: list[StepReport] = []
        self.ledger: list[tuple[int, list[int]]] = []
        self.measured: list[int] = []
        self.score = 0.25
        self.store = options.pop("store", None)
        self.trainer = AsyncTrainer(
            settings=settings,
            method=options.pop("method", METHOD),
            policy=world.policy,
            pad_token_id=0,
            identity=IDENTITY,
            evaluate=self.evaluate,
            metrics_logger=world.recorder,
            checkpoints=self.store,
            on_step=self.reports.append,
            on_trained=self.trained,
            **options,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        self.measured.append(step)
        return {"accuracy": self.score}

    def trained(self, version: int, groups: Sequence[Group]) -> None:
        self.ledger.append((version, [one.position for one in groups]))

    def step(self, version: int, *groups: Group, counters: Counters | None = None) -> None:
        self.trainer.train(version, groups, counters or Counters())

    def logged(self, step: int) -> dict[str, float]:
        (found,) = (metrics for number, metrics in self.world.recorder.entries if number == step)
        return found

    @property
    def steps(self) -> list[int]:
        return [number for number, _ in self.world.recorder.entries]


@pytest.fixture
def new(new_world: Callable[[], Any]) -> Callable[..., Trained]:
    return lambda *args, **options: Trained(new_world(), *args, **options)


def test_groups_are_trained_in_the_order_of_their_positions_whatever_finished_first(new):
    """So that a step is the same batch, to the bit, however its rollouts went."""
    one, other = new(), new()
    one.step(1, group(7), group(3))
    other.step(1, group(3), group(7))
    assert one.ledger == other.ledger == [(1, [3, 7])]
    batch = one.world.policy.trained[0]
    assert batch.input_ids[:, 1].tolist() == [3, 3, 7, 7]
    assert torch.equal(one.world.policy.table, other.world.policy.table)
    assert one.world.policy.table.abs().sum() > 0, "and it was trained"
    one.trainer.flush()
    assert [t.group_id for t in one.reports[0].trajectories] == ["train/3"] * 2 + ["train/7"] * 2


def test_the_age_of_a_step_is_counted_from_the_version_that_it_began_with(new):
    run = new()
    old = group(0, oldest=3, newest=3)
    mixed = group(1, oldest=4, newest=5, stragglers=0)
    run.step(6, mixed, old)
    run.trainer.flush()
    found = run.logged(6)
    assert found["staleness_mean"] == 1.5
    assert found["staleness_max"] == 2.0
    assert found["groups_of_several_versions"] == 1.0
    assert found["stragglers"] == 0.0


def test_what_the_controller_has_counted_is_logged_as_it_was_when_the_step_was_asked_for(new):
    run = new()
    counters = Counters(1, 2, 3, 4, 5, 6, 7, 8, 9.5)
    run.step(1, group(0), group(1), counters=counters)
    counters.late = 1000
    run.trainer.flush()
    found = {name: value for name, value in run.logged(1).items() if name.startswith("controller/")}
    assert found == {
        "controller/infra_retries": 1.0,
        "controller/data_retries": 2.0,
        "controller/timeouts": 3.0,
        "controller/stale_rows": 4.0,
        "controller/straggler_rows": 5.0,
        "controller/stragglers": 6.0,
        "controller/late": 7.0,
        "controller/discarded_groups": 8.0,
        "controller/overslept_s": 9.5,
    }
    assert all(type(value) is float for value in found.values())


def test_a_straggler_is_a_failure_by_name_that_ends_no_run(new):
    """Its group was closed by choice: max_infra_failures is 0 here."""
    run = new()
    run.step(
        1,
        group(0, rollout(0, 0), Missing(1, "its group had waited long enough for it"), stragglers=1),
        group(1, Missing(0, "its group had waited long enough for it"), rollout(1, 1), stragglers=1),
    )
    run.trainer.flush()
    assert run.logged(1)["failures_infra"] == 2.0
    assert run.logged(1)["stragglers"] == 2.0
    assert run.trainer.state.failures == {"infra": 2, "data": 0}
    first, second = run.reports[0].failures
    assert (first.group_id, first.rollout_id, first.kind) == ("train/0", "train/0/1", FailureKind.INFRA)
    assert first.error == "its group had waited long enough for it"
    assert second.rollout_id == "train/1/0"


def test_a_rollout_that_failed_is_not_excused_by_a_straggler_of_its_step(new):
    run = new()
    straggling = group(0, rollout(0, 0), Missing(1, "waited long enough"), stragglers=1)
    with pytest.raises(LoopError, match=r"step 1: 2 rollouts failed for want .*the first, train/0/1 "):
        run.step(1, straggling, group(1, rollout(1, 0), failed(1, 1)))
    assert not run.world.policy.trained, "before anything is trained"
    assert run.trainer.state.step == 0


def test_a_try_that_took_too_long_until_its_budget_was_gone_is_a_failure_like_any_other(new):
    """That outcome is a Missing as well, and nobody chose it: the group counts no straggler."""
    run = new()
    with pytest.raises(LoopError, match="1 rollouts failed for want of infrastructure"):
        run.step(1, group(0, rollout(0, 0), Missing(1, "try 5 took longer than 60 s")), group(1))


def test_failures_within_the_budget_are_trained_around(new):
    run = new(replace(SETTINGS, max_infra_failures=1))
    run.step(1, group(0, rollout(0, 0), failed(0, 1)), group(1))
    assert run.world.policy.trained[0].input_ids[:, 1].tolist() == [1, 1], (
        "alone it has nobody to differ from"
    )
    with pytest.raises(LoopError, match="2 rollouts failed"):
        run.step(2, group(2, rollout(2, 0), failed(2, 1)), group(3, failed(3, 0), rollout(3, 1)))


def test_too_many_failures_of_the_data_end_the_run(new):
    run = new(replace(SETTINGS, max_data_failures_share=0.25))
    data = FailureKind.DATA
    run.step(1, group(0, rollout(0, 0), failed(0, 1, data)), group(1))
    with pytest.raises(
        LoopError, match=r"2 of 4 rollouts .*the first, train/2/1 \(agent adder\): it went away"
    ):
        run.step(2, group(2, rollout(2, 0), failed(2, 1, data)), group(3, failed(3, 0, data), rollout(3, 1)))


def test_steps_in_vain_end_the_run_and_the_last_of_them_is_still_told(new):
    run = new(replace(SETTINGS, max_skipped_steps=1))
    alike = [rollout(0, 0, reward=0.5), rollout(0, 1, reward=0.5)]
    run.step(1, group(0, *alike), group(1, *(replace(t, group_id="train/1") for t in alike)))
    with pytest.raises(LoopError, match="step 2: 2 steps in a row trained nothing"):
        run.step(2, group(0, *alike), group(1, *(replace(t, group_id="train/1") for t in alike)))
    run.trainer.flush()
    assert run.steps == [1, 2]
    assert run.logged(2)["skipped"] == 1.0
    assert run.ledger == [(1, [0, 1]), (2, [0, 1])]


def test_m2_a_step_is_logged_once_with_its_evaluation_under_its_own_number(new):
    run = new()
    assert run.trainer.evaluate(0) is False
    assert run.world.recorder.entries == [(0, {"held_out/accuracy": 0.25})]
    run.step(1, group(0), group(1))
    assert run.steps == [0], "an evaluation may belong to it"
    run.trainer.evaluate(1)
    assert run.steps == [0, 1]
    assert run.logged(1)["held_out/accuracy"] == 0.25
    assert "loss" in run.logged(1)
    assert [report.step for report in run.reports] == [1]
    assert run.reports[0].metrics == run.logged(1), "whoever watches is told the same"
    run.trainer.flush()
    run.trainer.flush()
    assert run.steps == [0, 1]
    assert run.measured == [0, 1]


def test_m1_a_step_without_evaluation_is_logged_before_the_next_one_and_at_the_end(new):
    run = new()
    run.step(1, group(0), group(1))
    run.step(2, group(2), group(3))
    assert run.steps == [1]
    assert "held_out/accuracy" not in run.logged(1)
    run.trainer.evaluate(2)
    run.step(3, group(4), group(5))
    run.trainer.flush()
    assert run.steps == [1, 2, 3]
    assert [report.step for report in run.reports] == [1, 2, 3]


def test_m1_a_step_is_logged_before_it_is_saved(new, tmp_path):
    """A resume forgets what was logged after the checkpoint, and nothing of what it holds."""
    run = new(store=CheckpointStore(tmp_path))
    run.step(1, group(0), group(1))
    seen: list[list[int]] = []
    save = run.world.policy.save
    run.world.policy.save = lambda directory: (seen.append(list(run.steps)), save(directory))
    run.trainer.save(1, Snapshot(version=1))
    assert seen == [[1]]
    run.trainer.flush()
    assert run.steps == [1]


def test_a_failed_step_does_not_take_the_numbers_of_the_one_before_with_it(new):
    run = new()
    run.step(1, group(0), group(1))
    with pytest.raises(LoopError):
        run.step(2, group(2, failed(2, 0), failed(2, 1)), group(3))
    assert run.steps == [1]
    run.trainer.flush()
    assert run.steps == [1], "and tells nothing of a step that never was"


def test_the_first_number_that_is_good_enough_ends_the_run(new):
    run = new(replace(SETTINGS, stop_at=0.75))
    assert run.trainer.evaluate(0) is False
    run.score = 0.75
    run.step(1, group(0), group(1))
    assert run.trainer.evaluate(1) is True
    run.step(2, group(2), group(3))
    run.score = 0.74
    assert run.trainer.evaluate(2) is False, "the newest one counts"


def test_the_metric_that_ends_the_run_is_the_one_that_was_named(new):
    run = new(replace(SETTINGS, stop_at=0.1, stop_metric="f1"))
    assert run.trainer.evaluate(0) is False, "accuracy alone would do"


def test_without_a_bound_no_number_ends_the_run(new):
    run = new()
    run.score = 1e9
    assert run.trainer.evaluate(0) is False


SNAPSHOT = Snapshot(
    version=1,
    next_position=7,
    trained=PositionSet(2, [5]),
    ready=(
        group(3, rollout(3, 0, reward=0.1 + 0.2), Missing(1, "es dauerte zu lang"), newest=1, stragglers=1),
        group(6, failed(6, 0), rollout(6, 1), oldest=1, newest=1),
    ),
    histories=(
        RowHistory(2, 1, 2, (RolloutHistory(3, 2, 1), RolloutHistory(1, 0, 0))),
        RowHistory(4, 0, 0, (RolloutHistory(1, 0, 0), RolloutHistory(4, 1, 2))),
    ),
    counters=Counters(1, 2, 3, 4, 5, 6, 7, 8, 0.1 + 0.2),
)


def saved(run: Trained) -> Any:
    run.score = 0.5
    run.step(1, group(0), group(1))
    run.trainer.evaluate(1)
    run.trainer.save(1, SNAPSHOT)
    return run.store.latest()


def test_a_checkpoint_holds_policy_loop_and_controller_and_all_come_back_as_they_were(new, tmp_path):
    run, fresh = new(store=CheckpointStore(tmp_path)), new()
    checkpoint = saved(run)
    names = {path.name for path in checkpoint.path.iterdir()}
    assert names == {"controller.json", "groups.json", "loop.json", "policy", "manifest.json"}
    state, snapshot = resume_controller(fresh.world.policy, checkpoint, IDENTITY)
    assert snapshot == SNAPSHOT
    assert state == run.trainer.state
    assert isinstance(state, LoopState)
    assert state.held_out[0].metrics == {"accuracy": 0.5}
    assert torch.equal(fresh.world.policy.table, run.world.policy.table)
    assert run.store.best() == checkpoint, "its score is that of its own evaluation"


def test_a_resumed_trainer_goes_on_bit_for_bit(new, tmp_path):
    run = new(store=CheckpointStore(tmp_path))
    checkpoint = saved(run)
    fresh = new()
    state, _ = resume_controller(fresh.world.policy, checkpoint, IDENTITY)
    again = Trained(fresh.world, state=state)
    for one in (run, again):
        one.step(2, group(2), group(3))
        one.trainer.flush()
    assert torch.equal(again.world.policy.table, run.world.policy.table)
    timings = {"seconds_generation", "seconds_training"}
    assert {k: v for k, v in again.logged(2).items() if k not in timings} == {
        k: v for k, v in run.logged(2).items() if k not in timings
    }
    assert (again.trainer.state.step, again.trainer.state.rows_drawn) == (2, 4)


def test_a_checkpoint_of_another_run_is_not_gone_on_from(new, tmp_path):
    checkpoint = saved(new(store=CheckpointStore(tmp_path)))
    with pytest.raises(LoopError, match="belongs to a run with"):
        resume_controller(new().world.policy, checkpoint, {**IDENTITY, "seed": 1})


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("controller.json", lambda content: content.pop("trained"), SnapshotError),
        ("controller.json", lambda content: content["counters"].update(luck=1), SnapshotError),
        ("controller.json", lambda content: content["histories"][0]["rollouts"][0].pop(), SnapshotError),
        ("groups.json", lambda content: content.update(format=2), CheckpointCorruptError),
        ("groups.json", lambda content: content["groups"][0].pop("oldest"), CheckpointCorruptError),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_by_name(name, change, error, new, tmp_path):
    checkpoint = saved(new(store=CheckpointStore(tmp_path)))
    path = Path(checkpoint.path, name)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(error, match="resume with the version that wrote"):
        resume_controller(new().world.policy, checkpoint, IDENTITY)


def test_a_checkpoint_of_a_synchronous_run_says_what_it_lacks(new, tmp_path):
    checkpoint = saved(new(store=CheckpointStore(tmp_path)))
    Path(checkpoint.path, "groups.json").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"groups\.json cannot be read"):
        resume_controller(new().world.policy, checkpoint, IDENTITY)


def test_dynamic_sampling_is_refused_with_the_remedy(new):
    settings = replace(SETTINGS, dynamic_sampling=True)
    for refuse in (lambda: new(settings), lambda: check_asynchronous(settings, METHOD)):
        with pytest.raises(LoopError, match="turn it off, and filter_zero_spread on"):
            refuse()


def test_what_the_method_cannot_do_is_refused_as_in_every_loop(new):
    with pytest.raises(LoopError, match="updates_per_step 2"):
        new(
            replace(SETTINGS, updates_per_step=2),
            method=Method(GroupRelative(), ClippedPGLoss(force_on_policy_ratio=True)),
        )


def test_waiting_for_groups_is_told_apart_from_training_and_from_evaluation(new, monkeypatch):
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr("rl_algorithms.loops.asynchronous.time.perf_counter", lambda: float(next(clock)))
    run = new()
    # Each look at the clock takes 10 s: from the last thing done to the step is one, training is another.
    run.step(1, group(0), group(1))
    run.trainer.evaluate(1)
    run.step(2, group(2), group(3))
    run.trainer.flush()
    for step in (1, 2):
        assert run.logged(step)["seconds_generation"] == 10.0
        assert run.logged(step)["seconds_training"] == 10.0
    state = run.trainer.state
    assert (state.seconds_generation, state.seconds_training, state.seconds_evaluation) == (20.0, 20.0, 10.0)
