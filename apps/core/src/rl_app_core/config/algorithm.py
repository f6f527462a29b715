"""What tells one policy-gradient method from another."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import NonNegative, Positive, Share
from .training import Training


class Algorithm(Training):
    """Group relative policy optimisation."""

    advantage: Literal["grpo", "rloo", "dr_grpo"] = "grpo"
    """``grpo`` (centred and divided by the group's standard deviation), ``rloo`` (against the mean of
    the others) or ``dr_grpo`` (centred only)."""
    normalize: bool = True
    """With ``grpo``: divide by the standard deviation."""
    leave_one_out: bool = False
    """With ``grpo``: mean and deviation of the other members of the group."""
    clip_low: Share = 0.2
    """How far the importance ratio may fall below 1."""
    clip_high: NonNegative = 0.28
    """How far it may rise above 1."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the term for negative advantages, in multiples of the advantage."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL term against the policy at the start of reinforcement learning."""
    kl_form: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus."""
    report_entropy: bool = False
    """Measure the entropy without a bonus; it costs a little."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """What the loss is a mean over: all tokens, sequences, or sequences of ``max_new_tokens``."""
    importance_correction: Literal["tis", "icepop"] | None = None
    """Correction for an engine whose log-probabilities differ from the policy's: clamp the weights of
    tokens (``tis``) or drop tokens outside the bounds (``icepop``)."""
    importance_max: Positive | None = None
    """Upper bound of the weights; given together with the correction."""
    importance_min: Positive | None = None
    """Lower bound of the weights; ``icepop`` needs it."""
    filter_zero_spread: bool = False
    """Leave groups whose rewards are all equal out of the denominators, too."""
    overlong_filtering: bool = False
    """Truncated answers keep their place in the baseline and are not trained."""
    shuffle_rewards: bool = False
    """A diagnostic: permute the rewards over the whole batch. Nothing can be learnt then."""
