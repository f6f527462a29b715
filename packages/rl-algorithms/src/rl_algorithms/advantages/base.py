"""What an advantage estimator is given and gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..batching import TrainBatch
from ..needs import Needs


class AdvantageError(ValueError):
    """Rewards or settings that no advantage can be made of; names the offender and the remedy."""


@dataclass(frozen=True, eq=False, slots=True)
class AdvantageInputs:
    """One step's judged rollouts: N of them, anywhere in the batch and in any order.

    Attributes:
        rewards: ``[N]`` float64, shaped; anything (NaN included) where not valid.
        group_ids: N ids; a group is known by its id alone.
        valid: ``[N]`` bool; the others are neither in a baseline nor trained.
        batch: the N rollouts as a batch, row i being rollout i, with the log-probabilities that the
            estimator's ``needs`` name. Its ``loss_mask`` says which tokens are trained.
        components: named parts of the rewards, ``[N]`` float64 each; NaN where a rollout lacks one.
    """

    rewards: torch.Tensor
    group_ids: Sequence[str]
    valid: torch.Tensor
    batch: TrainBatch
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)


class AdvantageEstimator(Protocol):
    """``estimator(inputs) -> [N]`` (a rollout's worth, the same on all its tokens) or ``[N, S]``.

    Entries of rollouts that are not valid are 0; entries outside the batch's ``token_mask`` do not matter.

    Two further attributes may say more: ``compares_members`` (false unless given) that a group of one
    rollout teaches nothing, and ``silent_where_rewards_agree`` (true unless given) that a group does whose
    rewards are all equal.
    """

    @property
    def needs(self) -> Needs:
        """What the batch must carry."""
        ...

    @property
    def uses_rewards(self) -> bool:
        """Whether a rollout without a reward is of no use."""
        ...

    def __call__(self, inputs: AdvantageInputs) -> torch.Tensor: ...
