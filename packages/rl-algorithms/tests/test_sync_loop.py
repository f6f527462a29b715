"""The synchronous loop on a small policy that really learns."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest
import torch

from rl_algorithms.advantages import GDPO, GroupRelative, KLInReward, ReinforcePlusPlus
from rl_algorithms.checkpointing import CheckpointStore
from rl_algorithms.loops import LoopError, LoopSettings, run_sync
from rl_algorithms.loops.state import LoopState
from rl_algorithms.losses import ClippedPGLoss, DPOLoss, SFTLoss
from rl_algorithms.method import Method, MethodError
from rl_algorithms.needs import Needs
from rl_algorithms.rewards import OverlongPenalty, RewardShaping
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason

ROWS = list(range(6))
SETTINGS = LoopSettings(
    steps=6,
    prompts_per_step=4,
    group_size=8,
    learning_rate=0.3,
    warmup_steps=2,
    evaluate_every=2,
    checkpoint_every=3,
)
LEARNING = replace(
    SETTINGS, steps=60, prompts_per_step=6, group_size=16, evaluate_every=20, checkpoint_every=0
)
TIMINGS = {"seconds_generation", "seconds_training"}


def run(world, settings=SETTINGS, loss=None, advantage=None, **options):
    return run_sync(
        settings=settings,
        rows=ROWS,
        source=world.source,
        policy=world.policy,
        method=Method(advantage or GroupRelative(), loss or ClippedPGLoss(clip_high=0.28)),
        pad_token_id=0,
        metrics_logger=world.recorder,
        **{"evaluate": world.evaluate, **options},
    )


def run_long(world, settings, **options):
    """Many steps, each in one pass and not in micro-batches of four."""
    world.policy.micro_batch = settings.prompts_per_step * settings.group_size
    return run(world, settings, **options)


def failure(rollout, kind=FailureKind.INFRA, error="the server went away"):
    return RolloutFailure(rollout.group_id, rollout.rollout_id, "adder", kind, error)


def without_timings(entries):
    return [(step, {k: v for k, v in metrics.items() if k not in TIMINGS}) for step, metrics in entries]


def test_learns_and_reports(world):
    reports = []
    result = run_long(world, LEARNING, on_step=reports.append)
    curve = [(entry.step, entry.metrics["accuracy"]) for entry in result.held_out]
    assert [step for step, _ in curve] == [0, 20, 40, 60]
    assert curve[0][1] == 0.0
    assert curve[-1][1] >= 0.8, curve
    assert world.recorder.series("reward_mean")[-1] > 0.7 > 0.1 > world.recorder.series("reward_mean")[0]
    assert world.recorder.series("held_out/accuracy") == [accuracy for _, accuracy in curve]
    assert (result.steps_done, result.stopped) == (60, False)
    # Late in training groups agree.
    assert result.skipped_steps < 10
    assert result.tokens == sum(world.recorder.series("tokens"))
    assert result.seconds_generation == pytest.approx(sum(world.recorder.series("seconds_generation")))
    assert result.seconds_training == pytest.approx(sum(world.recorder.series("seconds_training")))
    assert [report.step for report in reports] == list(range(1, 61))
    assert len(reports[0].trajectories) == len(reports[0].advantages) == 96


def test_m2_one_entry_per_step_under_its_own_number(world):
    run(world)
    assert [step for step, _ in world.recorder.entries] == list(range(7))


def test_every_step_reports_what_was_promised(world):
    run(world)
    promised = {
        *("reward_mean", "accuracy", "truncated_share", "zero_spread_groups", "length_mean", "tokens"),
        *("failures_infra", "failures_data", "learning_rate", "grad_norm", "loss", "updates", "skipped"),
        *("first_ratio_min", "first_ratio_max", "logprob_gap_mean", "logprob_gap_max"),
        *("engine_ratio_mean", "engine_ratio_min", "engine_ratio_max"),
        *("seconds_generation", "seconds_training"),
    }
    for step, metrics in world.recorder.entries[1:]:
        assert promised <= metrics.keys(), step
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["first_ratio_min"] == pytest.approx(1, abs=1e-4)
        assert metrics["first_ratio_max"] == pytest.approx(1, abs=1e-4)
        assert metrics["logprob_gap_max"] <= 1e-5
    assert world.recorder.series("learning_rate")[:3] == pytest.approx([0.15, 0.3, 0.3])


def test_the_gap_between_engine_and_policy_shows(world):
    def quieter(step, rollout):
        turn = rollout.turns[0]
        turn = replace(turn, generation_logprobs=tuple(value - 0.25 for value in turn.generation_logprobs))
        return replace(rollout, turns=(turn,))

    world.source.replace = quieter
    run(world, replace(SETTINGS, steps=1))
    assert world.recorder.series("logprob_gap_mean") == [pytest.approx(0.25, abs=1e-5)]
    assert world.recorder.series("logprob_gap_max") == [pytest.approx(0.25, abs=1e-5)]
    for name in ("engine_ratio_mean", "engine_ratio_min", "engine_ratio_max"):
        assert world.recorder.series(name) == [pytest.approx(math.exp(0.25), abs=1e-5)]


@pytest.mark.parametrize("updates", [1, 3])
def test_resume_continues_bit_for_bit(new_world, tmp_path, updates):
    """6 steps equal 3, a new process' worth of objects, and 3 more: rows, tokens, losses, curve."""
    settings = replace(SETTINGS, updates_per_step=updates)
    whole = new_world()
    uninterrupted = run(whole, settings)

    first, second = new_world(), new_world()
    store = CheckpointStore(tmp_path)
    stop_after_three = [False] * 6 + [True]
    stopped = run(first, settings, checkpoints=store, should_stop=lambda: stop_after_three.pop(0))
    assert (stopped.steps_done, stopped.stopped) == (2, True)
    resumed = run(second, settings, checkpoints=store, resume_from=store.latest())

    assert first.source.calls[:2] + second.source.calls == whole.source.calls
    entries = first.recorder.entries + second.recorder.entries
    assert without_timings(entries) == without_timings(whole.recorder.entries)
    assert torch.equal(second.policy.table, whole.policy.table)
    for name in ("steps_done", "stopped", "held_out", "tokens", "skipped_steps", "failures"):
        assert getattr(resumed, name) == getattr(uninterrupted, name), name
    assert resumed.seconds_generation > stopped.seconds_generation > 0
    assert store.latest().step == 6


def test_learning_rate_zero_changes_nothing(world):
    before = world.policy.table.detach().clone()
    result = run(world, replace(SETTINGS, learning_rate=0.0))
    assert torch.equal(world.policy.table, before)
    assert {entry.metrics["accuracy"] for entry in result.held_out} == {0.0}
    assert sum(world.recorder.series("updates")) > 0


def test_shuffled_rewards_teach_nothing(new_world):
    honest, shuffled = new_world(), new_world()
    run_long(honest, replace(LEARNING, steps=25))
    run_long(shuffled, replace(LEARNING, steps=25, shuffle_rewards=True))
    assert sum(honest.recorder.series("reward_mean")[-5:]) / 5 > 0.5
    assert sum(shuffled.recorder.series("reward_mean")[-5:]) / 5 < 0.2


def test_shuffling_permutes_the_rewards_of_the_whole_batch(new_world):
    worlds = [new_world(), new_world(), new_world()]
    reports = [[], [], []]
    for world, seen, shuffle in zip(worlds, reports, (False, True, True), strict=True):
        run(
            world,
            replace(SETTINGS, steps=1, shuffle_rewards=shuffle),
            advantage=GroupRelative(normalize=False),
            on_step=seen.append,
        )
    plain, first, second = (seen[0] for seen in reports)
    assert first.metrics["reward_mean"] == plain.metrics["reward_mean"]
    assert first.advantages.tolist() == second.advantages.tolist() != plain.advantages.tolist()


def test_a_stop_after_the_rollouts_discards_the_step(world, tmp_path):
    store = CheckpointStore(tmp_path)
    # before evaluation, before and after the rollouts of steps 1 to 3
    answers = iter([False] * 6 + [True])
    result = run(world, checkpoints=store, should_stop=lambda: next(answers))
    assert (result.steps_done, result.stopped) == (2, True)
    assert [step for step, _ in world.source.calls] == [1, 2, 3]
    assert [step for step, _ in world.recorder.entries] == [0, 1, 2]
    assert result.tokens == sum(world.recorder.series("tokens"))
    assert store.latest().step == 2


def test_a_stop_before_the_first_step_leaves_something_to_resume(new_world, tmp_path):
    store = CheckpointStore(tmp_path)
    stopped = run(new_world(), checkpoints=store, should_stop=lambda: True)
    assert (stopped.steps_done, stopped.stopped, stopped.held_out) == (0, True, ())
    assert store.latest().step == 0
    again = run(new_world(), checkpoints=store, resume_from=store.latest(), should_stop=lambda: True)
    assert (again.steps_done, again.stopped) == (0, True)
    resumed = run(new_world(), checkpoints=store, resume_from=store.latest())
    assert resumed.steps_done == 6
    assert resumed.held_out[0].step == 0


def test_c11_a_failed_rollout_is_no_reward(world):
    """One of each group's 8 fails: means are over 7, and the failure is counted, not paid 0."""
    reports = []
    world.source.replace = lambda step, r: (
        failure(r) if r.rollout_id.endswith("/0") else replace(r, reward=1.0)
    )
    result = run(world, replace(SETTINGS, steps=1), on_step=reports.append)
    assert result.failures == {"infra": 4, "data": 0}
    metrics = reports[0].metrics
    assert (metrics["reward_mean"], metrics["samples_valid"], metrics["failures_infra"]) == (1.0, 28, 4)
    assert metrics["zero_spread_groups"] == 4, "a failure must not make a group look spread out"
    assert metrics["updates"] == 0
    assert len(reports[0].failures) == 4


def test_infrastructure_failures_beyond_the_budget_end_the_run(world, tmp_path):
    world.source.replace = lambda step, r: failure(r) if step == 5 else r
    store = CheckpointStore(tmp_path)
    with pytest.raises(
        LoopError, match=r"step 5: 32 rollouts failed .* is 5; .*5/0/0 \(agent adder\): the server"
    ):
        run(world, checkpoints=store)
    assert store.latest().step == 3


def test_data_failures_of_more_than_half_a_step_end_the_run(new_world):
    """17 of 32 rollouts are too many, 16 are not; an environment that fails in mid-rollout counts."""

    def failing(last):
        def spoil(step, r):
            _, place, member = (int(part) for part in r.rollout_id.split("/"))
            number = place * 8 + member
            if step != 2 or number > last:
                return r
            if number % 2:
                return failure(r, FailureKind.DATA, f"row {number} has no answer")
            return replace(r, stop_reason=StopReason.ENVIRONMENT_FAILURE)

        return spoil

    world = new_world()
    world.source.replace = failing(15)
    assert run(world).failures == {"infra": 0, "data": 16}
    world = new_world()
    world.source.replace = failing(16)
    with pytest.raises(
        LoopError,
        match=r"step 2: 17 of 32 .*max_data_failures_share is 0\.5; .*2/0/1 \(agent adder\): row 1 has no",
    ):
        run(world)
    assert world.policy.updates == 1, "the step is refused before it trains"
    run(new_world(), replace(SETTINGS, steps=2, max_data_failures_share=0.0))


def test_an_environment_that_always_fails_in_mid_rollout_is_named(world):
    world.source.replace = lambda step, r: replace(
        r, stop_reason=StopReason.ENVIRONMENT_FAILURE, agent="adder"
    )
    with pytest.raises(LoopError, match=r"32 of 32 .*1/0/0 \(agent adder\): the environment failed in mid"):
        run(world)


def test_a_step_without_usable_samples_is_skipped_and_counted(world):
    def broken(step, rollout):
        return failure(rollout, FailureKind.DATA, "row 3 has no answer") if step in (1, 2, 4) else rollout

    world.source.replace = broken
    result = run(world, replace(SETTINGS, max_data_failures_share=1.0))
    assert (result.steps_done, result.skipped_steps) == (6, 3)
    assert world.recorder.series("skipped") == [1, 1, 0, 1, 0, 0]
    assert result.failures == {"infra": 0, "data": 96}


def test_too_many_skipped_steps_in_a_row_end_the_run(world):
    world.source.replace = lambda step, r: failure(r, FailureKind.DATA, "row 3 has no answer")
    with pytest.raises(LoopError, match=r"step 3: 3 steps in a row trained nothing, .*row 3 has no answer"):
        run(world, replace(SETTINGS, max_data_failures_share=1.0))
    assert world.recorder.series("failures_data") == [32, 32, 32]


def test_steps_whose_groups_all_have_one_reward_are_skipped_and_end_the_run(world, caplog):
    world.source.replace = lambda step, rollout: replace(rollout, reward=0.0 if step != 2 else rollout.reward)
    with pytest.raises(
        LoopError, match=r"step 5: 3 steps in a row trained nothing, max_skipped_steps is 2; .*"
    ):
        run(world)
    assert world.recorder.series("skipped") == [1, 0, 1, 1, 1]
    assert world.recorder.series("updates") == [0, 1, 0, 0, 0]
    told = [record.getMessage() for record in caplog.records if "trains nothing" in record.getMessage()]
    assert [text.split(" trains")[0] for text in told] == ["step 1", "step 3"]
    assert "all equal" in told[0]


def test_a_step_whose_rows_are_kept_for_another_term_is_not_skipped(world):
    world.source.replace = lambda step, rollout: replace(rollout, reward=0.0)
    loss = ClippedPGLoss(entropy_coefficient=0.01)
    assert run(world, loss=loss).skipped_steps == 0


def test_steps_that_are_all_right_train_nothing_and_are_not_skipped(world):
    world.source.replace = lambda step, rollout: replace(rollout, reward=1.0)
    assert run(world).skipped_steps == 0
    assert world.recorder.series("updates") == [0] * 6


def test_samples_without_reward_tokens_or_environment_are_not_valid(world):
    def spoil(step, rollout):
        member = rollout.rollout_id.rsplit("/", 1)[1]
        if member == "0":
            return replace(rollout, reward=None)
        if member == "1":
            empty = replace(rollout.turns[0], generation_token_ids=(), generation_logprobs=())
            return replace(rollout, turns=(empty,), reward=1.0)
        if member == "2":
            return replace(rollout, reward=1.0, stop_reason=StopReason.ENVIRONMENT_FAILURE)
        return replace(rollout, reward=0.0)

    world.source.replace = spoil
    run(world, replace(SETTINGS, steps=1))
    metrics = world.recorder.entries[1][1]
    assert (metrics["samples_valid"], metrics["reward_mean"]) == (20, 0.0)
    assert (metrics["samples_without_reward"], metrics["samples_without_tokens"]) == (4, 4)
    assert metrics["failures_data"] == 4
    assert metrics["updates"] == 0


def test_c6_no_reward_is_excluded_with_a_warning_neither_zero_nor_nan(world, caplog):
    def spoil(step, rollout):
        if rollout.rollout_id in ("1/1/3", "1/2/0", "1/2/5"):
            return replace(rollout, reward=None, agent="adder")
        return replace(rollout, reward=1.0)

    world.source.replace = spoil
    with caplog.at_level(logging.WARNING):
        reports = []
        run(world, replace(SETTINGS, steps=1), on_step=reports.append)
    metrics = reports[0].metrics
    assert (metrics["samples_valid"], metrics["reward_mean"], metrics["samples_without_reward"]) == (
        29,
        1.0,
        3,
    )
    kept = torch.tensor([t.reward is not None for t in reports[0].trajectories])
    assert reports[0].trained.tolist() == kept.tolist()
    assert torch.isfinite(reports[0].advantages).all()
    warnings = [record.getMessage() for record in caplog.records if "no reward" in record.getMessage()]
    assert warnings == [
        "step 1: 3 of 32 rollouts have no reward and are excluded from training; the first is 1/1/3 "
        "(group 1/1, agent adder)"
    ]


def test_overlong_filtering_keeps_the_baseline_but_does_not_train(new_world):
    reports = []
    for filtering in (False, True):
        world = new_world()
        run(world, replace(SETTINGS, steps=1, overlong_filtering=filtering), on_step=reports.append)
    plain, filtered = reports
    assert plain.advantages.tolist() == filtered.advantages.tolist()
    truncated = torch.tensor([t.stop_reason is StopReason.LENGTH for t in filtered.trajectories])
    assert truncated.any()
    assert plain.trained.all()
    assert filtered.trained.tolist() == (~truncated).tolist()


def test_groups_without_spread_are_not_computed_but_counted(world):
    """Half of the groups all right: those rows are not given to the policy, their tokens still count."""
    world.source.replace = lambda step, r: replace(r, reward=1.0) if r.group_id in ("1/0", "1/1") else r
    settings = replace(SETTINGS, steps=1, group_size=64)
    run(world, settings)
    (batch,) = world.policy.trained
    metrics = world.recorder.entries[1][1]
    assert len(batch) <= 128 < 256
    assert batch.global_valid_tokens == metrics["tokens"]
    assert metrics["zero_spread_groups"] >= 2

    filtered = type(world)(type(world.policy)(), world.source, type(world.recorder)())
    filtered.source.policy = filtered.policy
    run(filtered, replace(settings, filter_zero_spread=True))
    (batch,) = filtered.policy.trained
    assert batch.global_valid_tokens < metrics["tokens"]
    assert filtered.recorder.entries[1][1]["reward_mean"] == metrics["reward_mean"]


def test_a2_a_length_penalty_does_not_make_an_all_wrong_group_informative(new_world):
    """All answers are wrong and paid by length alone: no spread, and not trained when so asked."""
    shaping = RewardShaping(overlong=OverlongPenalty(max_length=3, buffer=2))
    trained = []
    for filtering in (False, True):
        world = new_world()
        world.source.replace = lambda step, rollout: replace(rollout, reward=0.0)
        run(world, replace(SETTINGS, steps=1, shaping=shaping, filter_zero_spread=filtering))
        metrics = world.recorder.entries[1][1]
        assert metrics["zero_spread_groups"] == 4
        assert metrics["reward_mean"] == 0 > metrics["reward_shaped_mean"]
        trained.append(metrics["samples_trained"])
    assert trained == [32, 0]


def test_d1_each_update_has_its_own_denominators(new_world):
    """The scale of an update depends neither on updates per step nor on micro-batches."""
    losses = []
    for updates, micro_batch in ((1, 4), (1, 64), (2, 4), (4, 8)):
        world = new_world()
        world.policy.micro_batch = micro_batch
        run(world, replace(SETTINGS, steps=1, updates_per_step=updates, learning_rate=0.0, group_size=32))
        assert len(world.policy.trained) == updates
        tokens = [batch.global_valid_tokens for batch in world.policy.trained]
        assert sum(tokens) == world.recorder.series("tokens")[0]
        norms = world.recorder.series("grad_norm")
        losses.append(norms[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(losses[0] / 2 < norm < losses[0] * 2 for norm in losses), losses


def test_updates_of_a_step_share_the_log_probabilities_of_its_start(world):
    run(world, replace(SETTINGS, steps=1, updates_per_step=2, group_size=32, warmup_steps=0))
    first, second = world.policy.trained
    assert len(first) + len(second) <= 128
    assert torch.allclose(second.prev_logprobs[second.loss_mask], torch.tensor(-math.log(14)), atol=1e-5)
    metrics = world.recorder.entries[1][1]
    assert metrics["first_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] > 1.1


def test_only_what_the_loss_reads_is_scored(new_world):
    scored = []
    for loss in (
        ClippedPGLoss(),
        ClippedPGLoss(kl_coefficient=0.05),
        ClippedPGLoss(force_on_policy_ratio=True),
    ):
        world = new_world()
        run(world, replace(SETTINGS, steps=1), loss=loss)
        (batch,) = world.policy.trained
        scored.append((batch.prev_logprobs is not None, batch.reference_logprobs is not None, len(batch)))
    assert [flags[:2] for flags in scored] == [(True, False), (True, True), (False, False)]
    assert scored[1][2] == 32 > scored[0][2], "with a KL term rows of advantage 0 have a gradient"


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(world, tmp_path):
    real = world.policy.train

    def train(batch, loss_fn, *, learning_rate):
        report = real(batch, loss_fn, learning_rate=learning_rate)
        return {**report, "grad_norm": math.inf} if len(world.policy.trained) == 3 else report

    world.policy.train = train
    store = CheckpointStore(tmp_path)
    with pytest.raises(LoopError, match=r"step 3, update 1: grad_norm is inf"):
        run(world, replace(SETTINGS, checkpoint_every=1), checkpoints=store)
    assert store.latest().step == 2


def test_what_the_policy_raises_keeps_its_type_and_names_step_and_update(world):
    class OutOfMemory(RuntimeError):
        pass

    real = world.policy.train

    def train(batch, loss_fn, *, learning_rate):
        if len(world.policy.trained) == 3:
            raise OutOfMemory("no memory")
        return real(batch, loss_fn, learning_rate=learning_rate)

    world.policy.train = train
    with pytest.raises(OutOfMemory, match="no memory") as caught:
        run(world, replace(SETTINGS, updates_per_step=2, group_size=32))
    assert caught.value.__notes__ == ["step 2, update 2: the policy failed to train"]


def test_a_source_that_breaks_its_word_is_named(world):
    real = world.source.rollouts
    world.source.rollouts = lambda rows, **options: real(rows, **options)[:-1]
    with pytest.raises(LoopError, match="returned 31 rollouts for 4 rows of 8"):
        run(world, evaluate=None)
    world.source.rollouts = lambda rows, **options: real(rows, **options)[::-1]
    run(world, replace(SETTINGS, steps=1), evaluate=None)
    world.source.rollouts = real
    world.source.replace = lambda step, rollout: replace(
        rollout, group_id=rollout.group_id.replace("/3", "/2")
    )
    with pytest.raises(LoopError, match=r"rollouts 24 to 31 carry group ids \['1/2'\]"):
        run(world, evaluate=None)


def test_a_resume_must_continue_the_same_run(new_world, tmp_path):
    store = CheckpointStore(tmp_path)
    run(new_world(), checkpoints=store)
    with pytest.raises(LoopError, match="resume with the same settings and rows"):
        run(new_world(), replace(SETTINGS, seed=1), checkpoints=store, resume_from=store.latest())
    with pytest.raises(LoopError, match="ahead of this run, which starts from nothing"):
        run(new_world(), checkpoints=store)
    with pytest.raises(LoopError, match="step_6 is ahead of this run"):
        run(new_world(), checkpoints=store, resume_from=store.load(3))
    done = run(new_world(), checkpoints=store, resume_from=store.latest())
    assert (done.steps_done, done.stopped) == (6, False)


def test_a_resume_with_other_rows_of_the_same_number_is_refused(new_world, tmp_path):
    store = CheckpointStore(tmp_path / "digest")
    run(new_world(), replace(SETTINGS, steps=3), checkpoints=store, rows_digest="aa11")
    with pytest.raises(LoopError, match=r"aa11.*bb22.*resume with the same settings and rows"):
        run(new_world(), checkpoints=store, resume_from=store.latest(), rows_digest="bb22")
    run(new_world(), checkpoints=store, resume_from=store.latest())
    run(new_world(), checkpoints=store, resume_from=store.load(6), rows_digest="bb22")

    store = CheckpointStore(tmp_path / "same")
    run(new_world(), replace(SETTINGS, steps=3), checkpoints=store, rows_digest="aa11")
    assert run(new_world(), checkpoints=store, resume_from=store.latest(), rows_digest="aa11").steps_done == 6


def test_a_checkpoint_of_before_the_digest_can_be_resumed(new_world, tmp_path):
    store, older = CheckpointStore(tmp_path / "new"), CheckpointStore(tmp_path / "older")
    run(new_world(), replace(SETTINGS, steps=3), checkpoints=store)
    with older.write(3) as folder:
        (folder / "policy").mkdir()
        for name in ("loop.json", "policy/weights.json"):
            content = json.loads((store.path_of(3) / name).read_text())
            content.get("run", {}).pop("rows_digest", None)
            (folder / name).write_text(json.dumps(content))
    done = run(new_world(), checkpoints=older, resume_from=older.latest(), rows_digest="aa11")
    assert done.steps_done == 6
    assert json.loads((older.path_of(6) / "loop.json").read_text())["run"]["rows_digest"] == "aa11"


def test_a_run_that_ends_has_its_last_step_measured(new_world, tmp_path):
    """Stopped after step 3, which was not measured, and resumed with 3 as the last step."""
    store = CheckpointStore(tmp_path)
    first, second = new_world(), new_world()
    stopped = run(first, checkpoints=store, should_stop=lambda: len(first.recorder.entries) == 4)
    assert (stopped.steps_done, [entry.step for entry in stopped.held_out]) == (3, [0, 2])
    done = run(second, replace(SETTINGS, steps=3), checkpoints=store, resume_from=store.latest())
    assert (done.steps_done, done.stopped) == (3, False)
    assert [entry.step for entry in done.held_out] == [0, 2, 3]
    assert second.recorder.entries == [(3, {"held_out/accuracy": done.held_out[-1].metrics["accuracy"]})]
    assert done.seconds_evaluation > stopped.seconds_evaluation


def test_a_state_of_another_version_is_refused():
    content = LoopState(step=3).to_json()
    assert LoopState.from_json(content) == LoopState(step=3)
    with pytest.raises(LoopError, match=r"differ in flavour, tokens"):
        LoopState.from_json({k: v for k, v in content.items() if k != "tokens"} | {"flavour": 1})


def test_more_updates_than_the_loss_can_correct_are_refused(world):
    for loss in (ClippedPGLoss(force_on_policy_ratio=True), ClippedPGLoss(disable_ppo_ratio=True)):
        with pytest.raises(LoopError, match="the second would not be corrected"):
            run(world, replace(SETTINGS, updates_per_step=2), loss=loss)


@pytest.mark.parametrize(
    "advantage", [GroupRelative(), GroupRelative(leave_one_out=True), ReinforcePlusPlus(), GDPO()]
)
def test_a_group_of_one_is_refused_where_its_members_are_compared(world, advantage):
    with pytest.raises(LoopError, match=f"group_size 1 with {type(advantage).__name__}"):
        run(world, replace(SETTINGS, group_size=1), advantage=advantage)


@pytest.mark.parametrize("name", ["filter_zero_spread", "dynamic_sampling"])
@pytest.mark.parametrize(
    "advantage",
    [GDPO(), ReinforcePlusPlus(group_baseline=False), KLInReward(GroupRelative(), 0.1)],
    ids=lambda advantage: type(advantage).__name__,
)
def test_groups_that_teach_something_are_not_left_out_for_equal_rewards(world, advantage, name):
    with pytest.raises(LoopError, match=f"{name} leaves groups out .* {type(advantage).__name__} learns"):
        run(world, replace(SETTINGS, **{name: True}), advantage=advantage)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            lambda inputs: torch.full_like(inputs.rewards, math.nan),
            "Odd returned an advantage that is no finite",
        ),
        (lambda inputs: inputs.rewards[:3], r"Odd returned advantages of shape \[3\] for 32 rollouts"),
    ],
)
def test_an_estimator_that_gives_no_advantages_is_named(world, found, said):
    class Odd:
        needs = Needs()
        uses_rewards = True

        def __call__(self, inputs):
            return found(inputs)

    with pytest.raises(LoopError, match=said):
        run(world, advantage=Odd())


@pytest.mark.parametrize("loss", [SFTLoss(), DPOLoss()])
def test_a_loss_that_is_not_for_rollouts_is_refused(world, loss):
    with pytest.raises(MethodError, match=f"{type(loss).__name__} is no loss for rollouts"):
        run(world, loss=loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"group_size": 0}, "group_size"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"learning_rate": math.nan}, "learning rate"),
        ({"max_data_failures_share": 1.5}, "max_data_failures_share must lie in"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"max_generation_rounds": 0}, "max_generation_rounds"),
        ({"stop_at": math.nan}, "stop_at"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **options)


def test_what_came_before_the_first_step_is_checkpointed(new_world, tmp_path):
    """A run that is killed before its first regular checkpoint need not repeat its warm start."""
    store = CheckpointStore(tmp_path)
    warm = new_world()
    warm.policy.table.data[3, 9] = 2.0
    warm.source.replace = lambda step, rollout: failure(rollout)
    with pytest.raises(LoopError, match="step 1"):
        run(warm, checkpoints=store)
    cold = new_world()
    resumed = run(cold, replace(SETTINGS, learning_rate=0.0), checkpoints=store, resume_from=store.load(0))
    assert torch.equal(cold.policy.table, warm.policy.table)
    assert [entry.step for entry in resumed.held_out] == [0, 2, 4, 6]
    assert cold.recorder.entries[0][0] == 1, "what was measured before is not measured again"
