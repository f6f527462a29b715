"""Which groups a step trains, by each sampler."""

from __future__ import annotations

import pytest

from rl_algorithms.controller import InOrder, ReadyFirst, Sampler, WeightFifo, Windowed
from rl_algorithms.replay import Group


def group(position: int, *, oldest: int = 0, serial: int = 0) -> Group:
    return Group(position, ("sample",), oldest=oldest, newest=9, order=position, serial=serial)


READY = [group(p, oldest=o, serial=s) for s, (p, o) in enumerate([(5, 1), (0, 3), (2, 2), (7, 0), (1, 3)])]


@pytest.mark.parametrize(
    ("sampler", "running", "chosen"),
    [
        (InOrder(), [], [0, 1, 2]),
        (InOrder(), [3, 4, 6], [0, 1, 2]),
        (InOrder(), [1.5], None),
        (Windowed(3), [1.5], None),
        (Windowed(4), [1.5], [0, 1, 2]),
        (Windowed(4), [0.5, 1.5], None),
        (Windowed(1), [], [0, 1, 2]),
        (ReadyFirst(), [1.5, 1.6], [5, 0, 2]),
        (WeightFifo(), [1.5], [7, 5, 2]),
    ],
)
def test_a_step_of_three(sampler: Sampler, running, chosen):
    assert sampler.choose(READY, running, 3) == chosen


@pytest.mark.parametrize("sampler", [InOrder(), Windowed(9), ReadyFirst(), WeightFifo()])
def test_it_waits_for_a_whole_step(sampler: Sampler):
    assert sampler.choose(READY[:2], [], 3) is None
    assert sampler.choose([], [0], 1) is None
