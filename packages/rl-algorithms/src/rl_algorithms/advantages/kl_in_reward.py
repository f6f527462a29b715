"""The KL to the reference as a cost in the reward, in place of a term in the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..kl import KL_KINDS, KLKind, kl_estimate
from ..needs import Needs
from .base import AdvantageError, AdvantageEstimator, AdvantageInputs


@dataclass(frozen=True, slots=True)
class KLInReward:
    """Another estimator's advantages of ``reward − coefficient · Σ KL`` over a rollout's sampled tokens.

    The KL is estimated from the policy at the start of the step and carries no gradient. A sum over the
    rollout, hence no denominator; rollouts that are not valid stay as they are.

    Attributes:
        estimator: of the advantages.
        coefficient: ≥ 0.
        kind, input_clamp, output_clamp: see :func:`rl_algorithms.kl.kl_estimate`.

    Raises:
        AdvantageError: settings out of range, or an estimator that reads no rewards.

    Source: reinforcement learning from human feedback with a KL penalty, arXiv:2203.02155, equation 2.
    """

    estimator: AdvantageEstimator
    coefficient: float
    kind: KLKind = "k1"
    input_clamp: float = 20.0
    output_clamp: float = 10.0

    uses_rewards = True
    silent_where_rewards_agree = False

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < math.inf or self.kind not in KL_KINDS:
            raise AdvantageError(
                f"a KL in the reward needs a coefficient >= 0 and one of {', '.join(KL_KINDS)}, got "
                f"{self.coefficient} and {self.kind!r}"
            )
        if not self.estimator.uses_rewards:
            raise AdvantageError(f"{type(self.estimator).__name__} reads no rewards, so a KL in them is lost")

    @property
    def compares_members(self) -> bool:
        """As the estimator does."""
        return getattr(self.estimator, "compares_members", False)

    @property
    def needs(self) -> Needs:
        """The estimator's, and log-probabilities of policy and reference."""
        return self.estimator.needs | Needs(prev=True, reference=True)

    def __call__(self, inputs: AdvantageInputs) -> torch.Tensor:
        batch = inputs.batch
        if batch.prev_logprobs is None or batch.reference_logprobs is None:
            raise AdvantageError("a KL in the reward needs log-probabilities of policy and reference")
        # Also of rollouts that a filter keeps from training: they are in the baseline, and pay as others do.
        sampled = batch.token_mask & inputs.valid.to(batch.token_mask.device).unsqueeze(1)
        kl = kl_estimate(
            batch.prev_logprobs,
            batch.reference_logprobs,
            sampled,
            kind=self.kind,
            input_clamp=self.input_clamp,
            output_clamp=self.output_clamp,
        )
        cost = self.coefficient * torch.where(sampled, kl.values, 0.0).double().sum(1)
        return self.estimator(replace(inputs, rewards=inputs.rewards - cost.to(inputs.rewards.dtype)))
