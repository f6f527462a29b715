"""Settings of the policy-gradient loss that cannot be meant, refused when it is made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..kl import KL_KINDS
from .importance import IMPORTANCE_CORRECTIONS
from .normalization import NORMALIZATIONS, LossError

if TYPE_CHECKING:
    from .clipped_pg import ClippedPGLoss


def check_ranges(loss: ClippedPGLoss) -> None:
    def refuse(name: str, want: str) -> None:
        raise LossError(f"{name} must be {want}, got {getattr(loss, name)!r}")

    if not 0 <= loss.clip_low < 1:
        refuse("clip_low", "in [0, 1)")
    for name in ("clip_high", "kl_coefficient", "entropy_coefficient", "positive_nll_coefficient"):
        if not 0 <= getattr(loss, name) < math.inf:
            refuse(name, "a finite number >= 0")
    for name in ("kl_input_clamp", "kl_output_clamp"):
        if not 0 < getattr(loss, name) < math.inf:
            refuse(name, "a finite number > 0")
    if loss.dual_clip is not None and not 1 < loss.dual_clip < math.inf:
        refuse("dual_clip", "a finite number > 1, or None")
    if loss.constant_length is not None and loss.constant_length < 1:
        refuse("constant_length", "at least 1")
    for name, known in (
        ("kl_kind", KL_KINDS),
        ("normalization", NORMALIZATIONS),
        ("importance_correction", (None, *IMPORTANCE_CORRECTIONS)),
    ):
        if getattr(loss, name) not in known:
            refuse(name, f"one of {', '.join(str(k) for k in known)}")


def check_combinations(loss: ClippedPGLoss) -> None:
    if loss.disable_ppo_ratio and loss.force_on_policy_ratio:
        raise LossError("disable_ppo_ratio and force_on_policy_ratio exclude each other: choose one")
    for name in ("disable_ppo_ratio", "force_on_policy_ratio"):
        if getattr(loss, name) and loss.dual_clip is not None:
            raise LossError(f"dual_clip has no effect with {name}: drop one of them")
    _check_ratio(loss)
    if (loss.normalization == "constant") != (loss.constant_length is not None):
        raise LossError(
            f"normalization {loss.normalization!r} with constant_length {loss.constant_length}: 'constant' "
            "and constant_length are given together or not at all"
        )
    low, high = loss.importance_min, loss.importance_max
    if loss.importance_correction is None:
        if low is not None or high is not None:
            raise LossError(
                f"importance bounds {low}..{high} without importance_correction: choose tis, icepop or "
                "seq-mask-tis, or leave them out"
            )
        return
    if high is None:
        raise LossError(f"importance_correction {loss.importance_correction!r} needs importance_max")
    if low is None and loss.importance_correction in ("icepop", "seq-mask-tis"):
        raise LossError(f"importance_correction {loss.importance_correction!r} needs importance_min")
    if loss.importance_correction == "seq-mask-tis" and loss.sequence_ratio:
        raise LossError(
            "importance_correction 'seq-mask-tis' keeps weights of tokens, and sequence_ratio has one ratio "
            "per sequence: use 'tis' or 'icepop', or turn sequence_ratio off"
        )
    if not 0 <= (low or 0.0) <= high < math.inf or high == 0:
        raise LossError(f"importance bounds must satisfy 0 <= min <= max, 0 < max < inf; got {low}..{high}")
    if not (low or 0.0) <= 1 <= high:
        raise LossError(
            f"importance bounds {low}..{high} leave 1 out, which is the weight of every token that engine "
            "and policy agree about: put one on each side of 1"
        )


def _check_ratio(loss: ClippedPGLoss) -> None:
    others = [name for name in ("disable_ppo_ratio", "force_on_policy_ratio") if getattr(loss, name)]
    for name in ("sequence_ratio", "cispo"):
        if getattr(loss, name) and others:
            raise LossError(f"{name} changes the ratio that {others[0]} does without: choose one")
    if loss.sequence_ratio and loss.cispo:
        raise LossError("cispo weighs tokens, and sequence_ratio has one ratio per sequence: choose one")
    if loss.cispo and loss.dual_clip is not None:
        raise LossError("dual_clip has no effect with cispo, whose ratio is bounded on both sides: drop one")
    if loss.sequence_ratio and loss.normalization != "sequence":
        raise LossError(
            f"sequence_ratio belongs with normalization 'sequence', not with {loss.normalization!r}: a ratio "
            "of the whole sequence counts once for it"
        )
