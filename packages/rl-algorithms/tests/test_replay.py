"""Every position is reserved, ready or trained, never two of them, and nothing leaks."""

from __future__ import annotations

import random

import pytest

from rl_algorithms.replay import Group, PositionSet, ReplayBuffer, ReplayError


def group(position: int) -> Group:
    return Group(position, ("sample",), oldest=0, newest=0, order=position)


def test_a_position_set_is_a_set():
    rng = random.Random(0)
    members: set[int] = set()
    found = PositionSet()
    for _ in range(300):
        position = rng.randrange(60)
        members.add(position)
        found.add(position)
        assert set(found) == members
        assert len(found) == len(members)
        assert [p in found for p in range(-1, 61)] == [p in members for p in range(-1, 61)]
    assert PositionSet(found.below, found.beyond).beyond == found.beyond
    copy = found.copy()
    copy.add(1000)
    assert 1000 not in found


def test_a_group_is_reserved_committed_and_trained_once():
    buffer = ReplayBuffer()
    buffer.reserve(3)
    assert (buffer.running, buffer.waiting, buffer.accepted) == (1, 0, 0)
    buffer.commit(group(3))
    assert (buffer.running, buffer.waiting, buffer.accepted) == (0, 1, 1)
    assert buffer.take([3]) == [group(3)]
    assert (buffer.running, buffer.waiting, buffer.accepted) == (0, 0, 1)
    for again in (
        buffer.reserve,
        buffer.remove,
        lambda p: buffer.commit(group(p)),
        lambda p: buffer.take([p]),
    ):
        with pytest.raises(ReplayError, match="position 3 is trained"):
            again(3)


def test_nothing_changes_where_a_step_names_a_group_that_is_not_ready():
    buffer = ReplayBuffer()
    for position in (0, 1):
        buffer.reserve(position)
    buffer.commit(group(0))
    with pytest.raises(ReplayError, match="position 1 is reserved"):
        buffer.take([0, 1])
    with pytest.raises(ReplayError, match="named twice"):
        buffer.take([0, 0])
    assert [g.position for g in buffer.ready] == [0]
    assert len(buffer.trained) == 0


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_g5_no_reservation_leaks_however_groups_end(first):
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        buffer = ReplayBuffer()
        reserved: set[int] = set()
        ready: set[int] = set()
        trained: set[int] = set()
        for position in range(30):
            buffer.reserve(position)
            reserved.add(position)
            for _ in range(rng.randrange(4)):
                if reserved and rng.random() < 0.5:
                    one = rng.choice(sorted(reserved))
                    reserved.remove(one)
                    if rng.random() < 0.5:
                        buffer.commit(group(one))
                        ready.add(one)
                    else:
                        buffer.remove(one)
                elif ready:
                    one = rng.choice(sorted(ready))
                    ready.remove(one)
                    if rng.random() < 0.5:
                        buffer.take([one])
                        trained.add(one)
                    else:
                        buffer.remove(one)
            assert buffer.running == len(reserved)
            assert {g.position for g in buffer.ready} == ready
            assert set(buffer.trained) == trained
            assert buffer.accepted == len(ready) + len(trained)
        for position in list(reserved):
            buffer.remove(position)
        assert buffer.running == 0
