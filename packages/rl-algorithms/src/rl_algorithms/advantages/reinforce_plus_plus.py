"""REINFORCE++: rewards compared over the whole batch instead of within a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..needs import Needs
from .base import AdvantageInputs
from .group_relative import dr_grpo_advantages
from .whitening import whiten


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    """The reward, less the mean of its group if asked, whitened over all trained tokens of the batch.

    A rollout weighs as much as it has trained tokens: the denominators are the number of trained tokens of
    valid rollouts (mean) and that less one (variance). For a KL in the reward, as the paper has it, see
    :class:`rl_algorithms.advantages.KLInReward`.

    Attributes:
        group_baseline: subtract the mean of the group first (REINFORCE++-baseline); a group of one is 0 then.

    Source: arXiv:2501.03262, section 3.
    """

    group_baseline: bool = True

    needs = Needs()
    uses_rewards = True

    @property
    def compares_members(self) -> bool:
        """Without the group's baseline it compares with the whole batch."""
        return self.group_baseline

    @property
    def silent_where_rewards_agree(self) -> bool:
        """Likewise."""
        return self.group_baseline

    def __call__(self, inputs: AdvantageInputs) -> torch.Tensor:
        rewards = torch.where(inputs.valid, inputs.rewards, 0.0)
        if self.group_baseline:
            rewards = dr_grpo_advantages(inputs.rewards, inputs.group_ids, inputs.valid)
        tokens = inputs.batch.loss_mask.sum(1) * inputs.valid
        return whiten(rewards, tokens)
