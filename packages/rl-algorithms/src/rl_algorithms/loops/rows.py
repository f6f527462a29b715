"""Which rows come next: a pure function of how many were drawn, so that a resume needs only that number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def rows_at(position: int, count: int, *, row_count: int, seed: int) -> list[int]:
    """Indices of ``count`` rows after ``position`` were drawn, shuffled anew in every epoch.

    Draws walk through the epochs without a gap: every row appears once per epoch, and a draw may
    begin in one epoch and end in the next (its rows may then repeat).

    Raises:
        ValueError: a negative position, no rows, or a count below 1.
    """
    if position < 0 or row_count < 1 or count < 1:
        raise ValueError(
            f"position must be >= 0, row_count and count at least 1, got {position}, {row_count}, {count}"
        )
    return [
        int(_epoch_order(row_count, place // row_count, seed)[place % row_count])
        for place in range(position, position + count)
    ]


def seeded_permutation(count: int, *key: int) -> np.ndarray:
    """A permutation of ``range(count)``, ``[count]`` int64, that depends on ``key`` alone.

    The legacy generator is used because numpy froze its streams: the order must not change with
    the numpy of the machine that resumes.
    """
    return np.random.RandomState([part & 0xFFFFFFFF for part in key]).permutation(count)


@lru_cache(maxsize=4)
def _epoch_order(row_count: int, epoch: int, seed: int) -> np.ndarray:
    return seeded_permutation(row_count, seed, epoch)
