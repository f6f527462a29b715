"""Controls: no learning without a learning rate or true rewards."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


def test_without_a_learning_rate_accuracy_stays(branch, learned):
    run = branch(0, {"algorithm.learning_rate": 0.0, "algorithm.steps": 2})
    assert sum(run.metrics[step]["updates"] for step in (1, 2)) > 0
    assert run.summary["held_out_after"] == run.summary["held_out_before"]
    assert run.summary["held_out_before"] == learned.summary["held_out_before"]


def test_with_shuffled_rewards_nothing_is_learnt(branch):
    run = branch(0, {"algorithm.shuffle_rewards": True})
    assert run.summary["steps"] == 15
    assert run.summary["held_out_after"] <= 0.40
