"""Dynamic sampling, epochs and thresholds, on rollouts that are told what to earn."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rl_algorithms.advantages import Constant, GroupRelative
from rl_algorithms.checkpointing import CheckpointStore
from rl_algorithms.loops import DynamicSamplingError, LoopError, LoopSettings, run_sync
from rl_algorithms.loops.collect import collect
from rl_algorithms.loops.rows import rows_at
from rl_algorithms.losses import ClippedPGLoss
from rl_algorithms.method import Method
from rl_algorithms.rewards import OverlongPenalty, RewardShaping
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

SETTINGS = LoopSettings(
    steps=4,
    prompts_per_step=4,
    group_size=2,
    learning_rate=0.1,
    dynamic_sampling=True,
    max_generation_rounds=5,
)


class Scripted:
    """Row r earns what ``earn(r, member)`` says; ``None`` is a failed rollout."""

    def __init__(self, earn):
        self.earn = earn
        self.calls = []

    def rollouts(self, rows, *, group_size, step, greedy=False, first=0):
        self.calls.append((step, first, list(rows)))
        found = []
        for place, row in enumerate(rows, start=first):
            for member in range(group_size):
                name, reward = f"{step}/{place}", self.earn(row, member)
                if reward is None:
                    found.append(RolloutFailure(name, f"{name}/{member}", "a", FailureKind.INFRA, "gone"))
                    continue
                # Lengths differ, so that a length penalty would tell all rollouts apart.
                turn = Turn((13, row % 12), (6,) * (member + 1), (-1.0,) * (member + 1))
                found.append(Trajectory((turn,), reward, StopReason.STOP, name, f"{name}/{member}", "a"))
        return found


def even_rows_teach(row, member):
    return float(member) if row % 2 == 0 else 0.0


def gather(source, settings=SETTINGS, position=0, count=12):
    return collect(source, list(range(count)), settings, position=position, step=1, should_stop=lambda: False)


def test_flat_groups_are_replaced_until_the_step_is_full():
    source = Scripted(even_rows_teach)
    found = gather(source)
    groups = [rollout.group_id for rollout in found.rollouts[::2]]
    assert len(groups) == len(set(groups)) == 4
    drawn = [row for _, _, rows in source.calls for row in rows]
    assert found.rows_drawn == len(drawn)
    assert drawn == rows_at(0, len(drawn), row_count=12, seed=0), "each round goes on where the last ended"
    assert [first for _, first, _ in source.calls] == [
        sum(len(rows) for _, _, rows in source.calls[:i]) for i in range(len(source.calls))
    ]
    assert len(found.left_out) == 2 * (found.flat + found.surplus)
    assert found.flat == sum(row % 2 for row in drawn)
    assert found.flat + found.surplus + 4 == found.rows_drawn
    assert found.rounds == len(source.calls) > 1
    again = gather(Scripted(even_rows_teach))
    assert [r.rollout_id for r in again.rollouts] == [r.rollout_id for r in found.rollouts]


def test_a2_shaping_does_not_make_a_group_useful():
    settings = replace(SETTINGS, shaping=RewardShaping(overlong=OverlongPenalty(2, 2)))
    assert gather(Scripted(even_rows_teach), settings).flat == gather(Scripted(even_rows_teach)).flat > 0
    with pytest.raises(DynamicSamplingError, match=r"step 1: 0 of .* groups have rewards that differ"):
        gather(Scripted(lambda row, member: 0.0), settings)


def test_rounds_are_bounded():
    source = Scripted(lambda row, member: 0.0)
    with pytest.raises(DynamicSamplingError, match="within max_generation_rounds 5"):
        gather(source)
    assert len(source.calls) == 5
    assert all(len(rows) == 4 for _, _, rows in source.calls), "no round draws more than a step"


def test_what_a_full_step_has_no_room_for_is_counted():
    """One useful group of four, then four of four where three were wanted."""
    source = Scripted(lambda row, member: 0.0)
    source.earn = lambda row, member: float(
        member and (len(source.calls) > 1 or row == source.calls[0][2][0])
    )
    found = gather(source)
    assert (found.rounds, found.rows_drawn, found.flat, found.surplus) == (2, 8, 3, 1)
    assert len(found.rollouts) == 8
    assert found.metrics()["surplus_groups_left_out"] == 1.0


def test_without_it_what_comes_is_taken():
    found = gather(Scripted(even_rows_teach), replace(SETTINGS, dynamic_sampling=False))
    assert (found.rows_drawn, found.rounds, found.flat, len(found.rollouts)) == (4, 1, 0, 8)


def test_a_stop_between_rounds_leaves_nothing():
    answers = iter([False, True])
    assert (
        collect(
            Scripted(lambda row, member: 0.0),
            list(range(12)),
            SETTINGS,
            position=0,
            step=1,
            should_stop=lambda: next(answers),
        )
        is None
    )


def run(world, source, settings, rows=range(12), **options):
    return run_sync(
        settings=settings,
        method=options.pop("method", Method(GroupRelative(), ClippedPGLoss())),
        rows=list(rows),
        source=source,
        policy=world.policy,
        pad_token_id=0,
        metrics_logger=world.recorder,
        **options,
    )


def test_failures_and_tokens_of_groups_left_out_are_counted(world):
    def earn(row, member):
        return None if row == 3 else even_rows_teach(row, member)

    settings = replace(SETTINGS, steps=3, prompts_per_step=5, max_infra_failures=10)
    result = run(world, source := Scripted(earn), settings)
    drawn = [row for _, _, rows in source.calls for row in rows]
    assert drawn.count(3) > 0
    assert result.failures["infra"] == 2 * drawn.count(3)
    assert result.tokens == sum(3 for row in drawn if row != 3)
    logged = world.recorder.series("flat_groups_left_out")
    assert sum(logged) == sum(row % 2 for row in drawn)
    with pytest.raises(LoopError, match="rollouts failed for want of infrastructure"):
        run(world, Scripted(earn), replace(settings, max_infra_failures=0))


def test_a_resume_draws_the_rows_that_come_next(world, new_world, tmp_path):
    """How many rows a step took is not a function of its number, so the checkpoint holds it."""
    settings = replace(SETTINGS, steps=5, checkpoint_every=1)
    whole = Scripted(even_rows_teach)
    run(world, whole, settings)
    other, store = new_world(), CheckpointStore(tmp_path)
    first, second = Scripted(even_rows_teach), Scripted(even_rows_teach)
    run(other, first, replace(settings, steps=2), checkpoints=store)
    run(other, second, settings, checkpoints=store, resume_from=store.latest())
    assert first.calls + second.calls == whole.calls
    assert other.policy.table.tolist() == world.policy.table.tolist()
    state = json.loads((store.path_of(5) / "loop.json").read_text())["state"]
    assert state["rows_drawn"] == sum(len(rows) for _, _, rows in whole.calls)


@pytest.mark.parametrize(
    ("rows", "steps", "epochs", "done"), [(6, 8, None, 8), (20, 100, 2, 20), (6, 100, 1, 3), (5, 100, 1, 2)]
)
def test_a7_epochs_bound_a_run_and_their_absence_does_not(world, rows, steps, epochs, done):
    settings = LoopSettings(
        steps=steps, prompts_per_step=2, group_size=2, learning_rate=0.1, max_epochs=epochs
    )
    result = run(world, Scripted(lambda row, member: float(member)), settings, rows=range(rows))
    assert (result.steps_done, result.stopped) == (done, False)


def test_the_last_step_of_the_last_epoch_is_measured_and_saved(world, tmp_path):
    settings = LoopSettings(
        steps=100, prompts_per_step=2, group_size=2, learning_rate=0.1, max_epochs=1, evaluate_every=50
    )
    store = CheckpointStore(tmp_path)
    result = run(
        world,
        Scripted(lambda row, member: float(member)),
        settings,
        rows=range(6),
        checkpoints=store,
        evaluate=lambda step: {"accuracy": step / 10},
    )
    assert [entry.step for entry in result.held_out] == [0, 3]
    assert store.steps() == [0, 3]


def test_a_run_ends_when_it_is_good_enough(world, tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=1)
    settings = LoopSettings(
        steps=50, prompts_per_step=2, group_size=2, learning_rate=0.1, evaluate_every=2, stop_at=0.6
    )
    source = Scripted(lambda row, member: float(member))
    evaluate = {"evaluate": lambda step: {"accuracy": step / 10}}
    result = run(world, source, settings, checkpoints=store, **evaluate)
    assert (result.steps_done, result.reached, result.stopped) == (6, True, False)
    assert store.best().step == store.latest().step == 6
    again = run(world, source, settings, checkpoints=store, resume_from=store.latest(), **evaluate)
    assert (again.steps_done, again.reached) == (6, True), "a resume of a finished run trains nothing"
    never = run(world, source, replace(settings, steps=3, stop_at=2.0), **evaluate)
    assert (never.steps_done, never.reached) == (3, False)


def test_dynamic_sampling_needs_rewards(world):
    with pytest.raises(LoopError, match="this method uses no rewards"):
        run(world, Scripted(even_rows_teach), SETTINGS, method=Method(Constant(), ClippedPGLoss()))


def fork_of(trajectory, tokens):
    turn = Turn((13, 1, 2), (6,) * tokens, (-1.0,) * tokens)
    return replace(trajectory, turns=(turn,), reward=None)


class Forking(Scripted):
    """As told, and every second rollout was rewritten twice on its way."""

    def rollouts(self, rows, **options):
        found = super().rollouts(rows, **options)
        return [
            replace(t, forks=(fork_of(t, 3), fork_of(t, 1))) if index % 2 else t
            for index, t in enumerate(found)
        ]


def test_a_fork_is_worth_what_its_rollout_is_and_enters_no_baseline(world):
    settings = LoopSettings(steps=1, prompts_per_step=2, group_size=2, learning_rate=0.1)
    reports = []
    method = Method(GroupRelative(normalize=False), ClippedPGLoss())
    result = run(
        world,
        Forking(lambda row, member: float(member)),
        settings,
        method=method,
        on_step=reports.append,
    )
    (batch,) = world.policy.trained
    assert batch.advantages.tolist() == [-0.5, 0.5, 0.5, 0.5] * 2, "means are of two rollouts, not of four"
    assert batch.loss_mask.sum(1).tolist() == [1, 2, 3, 1] * 2
    assert reports[0].advantages.tolist() == [-0.5, 0.5] * 2
    assert len(reports[0].trajectories) == 4
    assert result.tokens == 14
    assert world.recorder.series("length_mean") == [1.5]


def test_an_advantage_of_tokens_cannot_be_passed_on_to_forks(world):
    class ByToken(GroupRelative):
        def __call__(self, inputs):
            return super().__call__(inputs).unsqueeze(1).expand(inputs.batch.input_ids.shape)

    settings = LoopSettings(steps=1, prompts_per_step=2, group_size=2, learning_rate=0.1)
    with pytest.raises(LoopError, match="ByToken values each token by itself"):
        run(
            world,
            Forking(lambda row, member: float(member)),
            settings,
            method=Method(ByToken(), ClippedPGLoss()),
        )


def test_a4_a_long_rollout_of_several_turns_is_kept_whole(world):
    """Turns of 6 tokens with 4 of the environment between them: 26 in all, 18 of them trained."""
    turns = tuple(Turn((1,) * length, (6,) * 6, (-1.0,) * 6) for length in (1, 4, 4))

    class Long(Scripted):
        def rollouts(self, rows, **options):
            return [replace(t, turns=turns) for t in super().rollouts(rows, **options)]

    settings = LoopSettings(steps=1, prompts_per_step=1, group_size=2, learning_rate=0.1)
    run(world, Long(lambda row, member: float(member)), settings)
    (batch,) = world.policy.trained
    assert batch.lengths.tolist() == [27, 27]
    assert batch.loss_mask.sum(1).tolist() == [18, 18]


def test_the_bound_on_advantages_binds(world):
    settings = LoopSettings(steps=1, prompts_per_step=1, group_size=2, learning_rate=0.1)
    method = Method(GroupRelative(normalize=False), ClippedPGLoss(), advantage_clip=0.25)
    run(world, Scripted(lambda row, member: float(member)), settings, method=method)
    assert world.policy.trained[0].advantages.tolist() == [-0.25, 0.25]
