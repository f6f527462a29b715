from __future__ import annotations

import pytest

from rl_algorithms.schedules import LearningRateSchedule


def rates(schedule, *steps):
    return [schedule(step) for step in steps]


def test_warm_up_then_constant():
    schedule = LearningRateSchedule(peak=2.0, warmup_steps=4)
    assert rates(schedule, 1, 2, 4, 5, 1000) == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert LearningRateSchedule(peak=2.0)(1) == 2.0


def test_linear_and_cosine_end_at_the_floor_and_stay():
    linear = LearningRateSchedule(peak=1.0, warmup_steps=2, decay="linear", total_steps=12, floor=0.1)
    assert rates(linear, 2, 7, 12, 50) == pytest.approx([1.0, 0.55, 0.1, 0.1])
    cosine = LearningRateSchedule(peak=1.0, warmup_steps=2, decay="cosine", total_steps=12, floor=0.1)
    assert rates(cosine, 2, 7, 12, 50) == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert cosine(4) > linear(4)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_warm_up_as_long_as_the_run(decay):
    schedule = LearningRateSchedule(peak=1.0, warmup_steps=5, decay=decay, total_steps=5)
    assert rates(schedule, 1, 5) == pytest.approx([0.2, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak": -1.0}, "learning rate"),
        ({"peak": float("nan")}, "learning rate"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"floor": 2.0}, "floor"),
        ({"decay": "cosine"}, "needs total_steps"),
        ({"decay": "square"}, "'square' is unknown"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule(**{"peak": 1.0, **options})
