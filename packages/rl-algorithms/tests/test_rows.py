from __future__ import annotations

from collections import Counter

import pytest

from rl_algorithms.loops.rows import rows_at, seeded_permutation


def rows(step, *, count=10, per_step=4, seed=0):
    return rows_at((step - 1) * per_step, per_step, row_count=count, seed=seed)


def test_every_row_once_per_epoch():
    walked = [row for step in range(1, 6) for row in rows(step)]
    assert sorted(walked[:10]) == sorted(walked[10:]) == list(range(10))
    assert walked[:10] != walked[10:], "a new epoch has a new order"


def test_h3_a_resume_on_an_epoch_boundary_goes_on():
    assert sorted(rows(3, count=4) + rows(3, count=4)) == sorted([0, 1, 2, 3] * 2)


def test_more_rows_per_step_than_rows():
    assert Counter(rows(1, count=3, per_step=7)) in (
        Counter({a: 3 if a == more else 2 for a in range(3)}) for more in range(3)
    )


def test_depends_on_seed_and_step_alone():
    assert rows(2) == rows(2)
    assert rows(1, count=1000) != rows(1, count=1000, seed=1)
    assert seeded_permutation(5, 3, 4).tolist() != seeded_permutation(5, 4, 3).tolist()


def test_order_is_pinned():
    """A resumed run must see the same rows whatever the version of numpy: never change these."""
    assert rows(1) == [3, 7, 6, 4]
    assert rows(3) == [5, 9, 9, 4]


def test_refuses():
    for options in ({"step": 0}, {"step": 1, "count": 0}, {"step": 1, "per_step": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            rows(**options)
