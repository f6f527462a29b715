"""How hard each row asks the policy to think."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from .config import EffortLevel
from .dataset import GymRow
from .errors import DatasetError
from .suggestions import did_you_mean

FIELD = "effort"


def choose_effort(
    row: GymRow, levels: Sequence[EffortLevel], *, seed: int, step: int, occurrence: int = 0
) -> EffortLevel | None:
    """The level of all rollouts of a row in one step.

    A row's own field ``effort`` wins. Otherwise the level is drawn with the levels' shares, by a hash of
    seed, step and row id alone, so that it is the same wherever and whenever it is computed; what the
    shares leave over of 1 gets no level.

    Args:
        row: the task.
        levels: of the run; without any, a row's field is the environment's affair.
        seed: of the run.
        step: of the run.
        occurrence: tells repeats of one row in one step apart.

    Raises:
        DatasetError: the row names a level that is not there.
    """
    if not levels:
        return None
    named = row.verifier.get(FIELD)
    if named is not None:
        return _by_name(named, levels, row.row_id)
    drawn = _uniform(seed, step, row.row_id, occurrence)
    for level in levels:
        drawn -= level.share
        if drawn < 0:
            return level
    return None


def _by_name(name: object, levels: Sequence[EffortLevel], row_id: str) -> EffortLevel:
    for level in levels:
        if level.name == name:
            return level
    names = [level.name for level in levels]
    hint = did_you_mean(str(name), names) or f"the levels are {', '.join(names)}"
    raise DatasetError(
        f"row {row_id!r} asks for {name!r}, which is no effort level", field=FIELD, remedy=hint
    )


def _uniform(seed: int, step: int, row_id: str, occurrence: int) -> float:
    """A number in [0, 1) that depends on the arguments alone."""
    key = json.dumps(["effort", seed, step, row_id, occurrence]).encode("ascii")
    return int.from_bytes(hashlib.sha256(key).digest()[:6], "big") / 2**48
