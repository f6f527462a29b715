"""Which rows a step trains on: a pure function of the step, so that a resume needs only its number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def rows_for_step(step: int, *, row_count: int, rows_per_step: int, seed: int) -> list[int]:
    """Indices of the rows of ``step`` ≥ 1, shuffled anew in every epoch.

    Steps walk through the epochs without a gap: every row appears once per epoch, and a step may
    begin in one epoch and end in the next (its rows may then repeat).

    Raises:
        ValueError: a step below 1, no rows, or rows_per_step below 1.
    """
    if step < 1 or row_count < 1 or rows_per_step < 1:
        raise ValueError(
            f"step, row_count and rows_per_step must be at least 1, got {step}, {row_count}, {rows_per_step}"
        )
    first = (step - 1) * rows_per_step
    return [
        int(_epoch_order(row_count, position // row_count, seed)[position % row_count])
        for position in range(first, first + rows_per_step)
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
