from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.batching import build_sft_batch
from rl_algorithms.loops import LoopError, SFTSettings, run_sft
from rl_algorithms.schedules import LearningRateSchedule

SETTINGS = SFTSettings(steps=30, schedule=LearningRateSchedule(peak=0.3, warmup_steps=3))


def batch_for_step(step):
    rows = [(step + offset) % 6 for offset in range(4)]
    return build_sft_batch([([13, row, row + 6, 12], [0, 0, 1, 1]) for row in rows], pad_token_id=0)


def test_learns_its_demonstrations(world):
    result = run_sft(
        settings=SETTINGS,
        policy=world.policy,
        batch_for_step=batch_for_step,
        metrics_logger=world.recorder,
    )
    assert (result.steps_done, result.stopped, result.tokens) == (30, False, 30 * 8)
    assert world.evaluate(0) == {"accuracy": 1.0}
    losses = world.recorder.series("loss")
    assert losses[0] == pytest.approx(math.log(14))
    assert result.loss == losses[-1] < 0.1
    assert [step for step, _ in world.recorder.entries] == list(range(1, 31))
    assert world.recorder.series("learning_rate")[:4] == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_stops_and_continues(new_world, tmp_path):
    whole, parts = new_world(), new_world()
    run_sft(settings=SETTINGS, policy=whole.policy, batch_for_step=batch_for_step)
    asked = []
    first = run_sft(
        settings=SETTINGS,
        policy=parts.policy,
        batch_for_step=batch_for_step,
        should_stop=lambda: len(asked) == 11,
        on_step=lambda step, metrics: asked.append(step),
    )
    assert (first.steps_done, first.stopped) == (11, True)
    parts.policy.save(tmp_path)
    later = new_world()
    later.policy.load(tmp_path)
    run_sft(settings=SETTINGS, policy=later.policy, batch_for_step=batch_for_step, first_step=12)
    assert torch.equal(later.policy.table, whole.policy.table)


def test_refuses_to_go_on_without_a_finite_loss(world):
    world.policy.table.data.fill_(math.nan)
    with pytest.raises(LoopError, match="supervised step 1: loss is nan"):
        run_sft(settings=SETTINGS, policy=world.policy, batch_for_step=batch_for_step)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        SFTSettings(steps=0, schedule=SETTINGS.schedule)
