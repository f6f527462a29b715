"""GDPO: several rewards, each normalised by itself before they are added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..needs import Needs
from .base import AdvantageError, AdvantageInputs
from .group_relative import grpo_advantages
from .whitening import whiten


@dataclass(frozen=True, slots=True)
class GDPO:
    """Σ over components of the group-normalised component, whitened over the valid rollouts of the batch.

    Adding rewards before they are normalised makes different combinations of components worth the same.
    Denominators: within a group those of :func:`rl_algorithms.advantages.grpo_advantages`; for the whitening
    the number of valid rollouts, and that less one.

    Attributes:
        weights: of components by name; those not named have weight 1.

    Raises:
        AdvantageError: when called, fewer than two components, a valid rollout without one of them, or a
            weight for a component that is not there.

    Source: arXiv:2601.05242, section 3.
    """

    weights: Mapping[str, float] = field(default_factory=dict)

    needs = Needs()
    uses_rewards = True
    compares_members = True
    # Equal totals may be made of components that differ.
    silent_where_rewards_agree = False

    def __call__(self, inputs: AdvantageInputs) -> torch.Tensor:
        names = sorted(inputs.components)
        if not inputs.valid.any():
            return torch.zeros_like(inputs.rewards)
        if len(names) < 2:
            raise AdvantageError(
                f"gdpo needs at least two reward components, the environment reports {names or 'none'}: use "
                "another advantage, or report the parts of the reward (reward_components)"
            )
        unknown = sorted(self.weights.keys() - set(names))
        if unknown:
            raise AdvantageError(f"gdpo has weights for {unknown}, and the components are {names}")
        total = torch.zeros_like(inputs.rewards)
        for name in names:
            component = inputs.components[name].to(total.dtype)
            missing = (inputs.valid & ~torch.isfinite(component)).nonzero().flatten().tolist()
            if missing:
                raise AdvantageError(
                    f"rollouts {missing} have no finite component {name!r}, which others have: gdpo needs "
                    "every component of every rollout"
                )
            total += self.weights.get(name, 1.0) * grpo_advantages(component, inputs.group_ids, inputs.valid)
        return whiten(total, inputs.valid)
