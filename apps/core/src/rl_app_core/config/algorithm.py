"""What tells one policy-gradient method from another."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from .section import Finite, NonNegative, Positive, Share
from .training import Training


class Algorithm(Training):
    """Group relative policy optimisation."""

    advantage: str = "grpo"
    """``grpo`` (centred and divided by the group's standard deviation), ``rloo`` (against the mean of
    the others), ``dr_grpo`` (centred only), ``reinforce_plus_plus`` (whitened over the batch's tokens),
    ``gdpo`` (each reward component by itself), or ``module:Class`` of your own."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a class of your own, and ``{weights: {COMPONENT: WEIGHT}}`` of ``gdpo``."""
    normalize: bool = True
    """With ``grpo``: divide by the standard deviation."""
    leave_one_out: bool = False
    """With ``grpo``: mean and deviation of the other members of the group."""
    group_baseline: bool = True
    """With ``reinforce_plus_plus``: subtract the mean of the group first."""
    advantage_clip: Positive | None = None
    """Bound on the absolute advantage."""
    invalid_tool_call_advantage: Finite | None = None
    """Advantage of turns that write a tool call as text instead of making it, whatever was computed."""
    malformed_thinking_advantage: Finite | None = None
    """The same for turns whose thinking tags do not match."""
    loss: str = "clipped_pg"
    """``clipped_pg``, which all keys below describe, or ``module:Class`` of your own."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a class of your own."""
    objective: Literal["ppo", "gspo", "cispo", "reinforce", "on_policy"] = "ppo"
    """``ppo`` (clipped ratio of each token), ``gspo`` (one ratio per sequence; with ``normalization``
    ``sequence``), ``cispo`` (the clipped ratio is a weight, and clipped tokens keep their gradient),
    ``reinforce`` (no ratio) or ``on_policy`` (a ratio of 1 with its gradient)."""
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
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether that KL is a term of the loss, or a cost of the rollout that lowers its reward."""
    positive_nll_coefficient: NonNegative = 0.0
    """Weight of the likelihood of tokens with a positive advantage, as in supervised learning."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus."""
    report_entropy: bool = False
    """Measure the entropy without a bonus; it costs a little."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """What the loss is a mean over: all tokens, sequences, or sequences of ``max_new_tokens``."""
    importance_correction: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """Correction for an engine whose log-probabilities differ from the policy's: clamp the weights of
    tokens (``tis``), drop tokens outside the bounds (``icepop``) or whole sequences (``seq-mask-tis``)."""
    importance_max: Positive | None = None
    """Upper bound of the weights, or with ``seq-mask-tis`` of a sequence's geometric mean; given together
    with the correction."""
    importance_min: Positive | None = None
    """Lower bound likewise; all but ``tis`` need it."""
    filter_zero_spread: bool = False
    """Leave groups whose rewards are all equal out of the denominators, too."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of further rows, until the step is full."""
    max_generation_rounds: PositiveInt = 10
    """With ``dynamic_sampling``: how often a step may sample; one more ends the run."""
    overlong_filtering: bool = False
    """Truncated answers keep their place in the baseline and are not trained."""
    shuffle_rewards: bool = False
    """A diagnostic: permute the rewards over the whole batch. Nothing can be learnt then."""

    @model_validator(mode="after")
    def _what_is_given_is_read(self) -> Algorithm:
        if self.loss != "clipped_pg":
            self.has_no_effect(
                f"with loss={self.loss}: it describes clipped_pg",
                *("objective", "clip_low", "clip_high", "dual_clip", "positive_nll_coefficient"),
                *("entropy_coefficient", "report_entropy", "normalization"),
                *("importance_correction", "importance_min", "importance_max"),
            )
            if self.kl_in == "loss":
                self.has_no_effect(
                    f"with loss={self.loss}: it describes clipped_pg", "kl_coefficient", "kl_form"
                )
        if self.objective in ("reinforce", "on_policy"):
            self.has_no_effect(f"with objective={self.objective}", "clip_low", "clip_high")
        if not self.kl_coefficient:
            self.has_no_effect("without kl_coefficient", "kl_form")
        if not self.dynamic_sampling:
            self.has_no_effect("without dynamic_sampling", "max_generation_rounds")
        return self
