"""Names and seeds of rollouts: the same task in the same step always gets the same ones."""

from __future__ import annotations

import hashlib
import json


def group_name(prefix: str, step: int, position: int) -> str:
    """Identity of the group at ``position`` of a step's rows; ``prefix`` separates uses of one step."""
    return f"{prefix}/{step}/{position}"


def rollout_name(group: str, index: int) -> str:
    """Identity of the ``index``-th rollout of a group."""
    return f"{group}/{index}"


def sampling_seed(*, seed: int, step: int, row_id: str, occurrence: int, index: int, turn: int) -> int:
    """Seed of one model call, in ``[0, 2**63)``.

    It depends on the row's identity, not on its position, so that other rows beside it change
    nothing; ``occurrence`` tells repeats of one row in one step apart, and ``turn`` keeps a rollout's
    turns from drawing the same random numbers.
    """
    key = json.dumps([seed, step, row_id, occurrence, index, turn]).encode("ascii")
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
