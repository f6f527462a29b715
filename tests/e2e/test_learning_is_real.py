"""Controls: no learning without a learning rate or true rewards, and a resume changes nothing."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


def test_without_a_learning_rate_accuracy_stays(branch, learned):
    run = branch(0, {"algorithm.learning_rate": 0.0, "algorithm.steps": 5})
    assert abs(run.summary["held_out_after"] - run.summary["held_out_before"]) <= 0.05
    assert run.summary["held_out_before"] == learned.summary["held_out_before"]


def test_with_shuffled_rewards_nothing_is_learnt(branch):
    run = branch(0, {"algorithm.shuffle_rewards": True})
    assert run.summary["steps"] == 20
    assert run.summary["held_out_after"] <= 0.40


def test_a_resumed_run_trains_the_same_rows_to_the_same_losses(branch, learned):
    run = branch(10, {})
    assert sorted(run.metrics) == list(range(21))
    for step in range(11, 16):
        for name in ("loss", "grad_norm", "reward_mean", "tokens", "logprob_gap_max"):
            assert run.metrics[step][name] == learned.metrics[step][name], (step, name)
    then, now = (
        [(r["step"], r["rollout_id"], r["token_ids"], r["reward"]) for r in source.rollouts]
        for source in (learned, run)
    )
    assert then == now
    assert run.summary["held_out_after"] == learned.summary["held_out_after"]
    assert run.summary["tokens"] == learned.summary["tokens"]
    assert run.summary["seconds"] > learned.metrics[10]["seconds"]
