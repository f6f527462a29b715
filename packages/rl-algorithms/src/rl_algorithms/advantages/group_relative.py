"""Advantages from the rewards of a group: how much better a rollout did than its siblings.

A group is known by its id alone. Members may lie anywhere in the batch and in any order. Members
that are not ``valid`` (the rollout failed, had no reward, sampled no token or is masked) neither
enter a baseline nor get an advantage; what their reward entry holds (NaN included) does not matter.

Everything is computed in float64 from centred differences and returned in the dtype of the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..needs import Needs
from .base import AdvantageInputs
from .groups import per_group

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """Rewards compared within their group; the estimator of GRPO, RLOO and Dr. GRPO.

    Attributes:
        leave_one_out: against the other members instead of all.
        normalize: divide by the standard deviation.

    See :func:`grpo_advantages`. RLOO is ``GroupRelative(leave_one_out=True, normalize=False)``, Dr. GRPO
    ``GroupRelative(normalize=False)`` with a loss normalised by a constant length.
    """

    leave_one_out: bool = False
    normalize: bool = True

    needs = Needs()
    uses_rewards = True
    compares_members = True

    def __call__(self, inputs: AdvantageInputs) -> torch.Tensor:
        return grpo_advantages(
            inputs.rewards,
            inputs.group_ids,
            inputs.valid,
            leave_one_out=self.leave_one_out,
            normalize=self.normalize,
        )


def grpo_advantages(
    rewards: torch.Tensor,
    group_ids: Sequence[str],
    valid: torch.Tensor,
    *,
    leave_one_out: bool = False,
    normalize: bool = True,
) -> torch.Tensor:
    """``(r − mean) / (std + 1e-6)`` within each group of n valid members, std with ddof 1.

    Denominators: the mean runs over the n valid members of the group, or over the other n − 1 with
    ``leave_one_out``; the variance is divided by one less than the number of members it runs over.

    A group without spread, or of one member, gets 0. With ``leave_one_out`` a member is compared
    with the others only, and divided only where the others have spread of their own: rewards
    ``[1, 0, 0, 0]`` give ``[1, −0.577349, −0.577349, −0.577349]``, not 10⁶ for the first. Spread
    means beyond the rounding of the rewards' dtype.

    Args:
        rewards: ``[N]`` floating point.
        group_ids: N ids.
        valid: ``[N]`` bool.
        leave_one_out: baseline and std over the other members.
        normalize: divide by the std; off leaves the centred reward.

    Returns:
        ``[N]``, dtype and device of ``rewards``.

    Raises:
        ValueError: shapes that do not belong together, or a valid reward that is not finite.

    Source: group-relative advantages of DeepSeekMath (GRPO), arXiv:2402.03300, section 4.1.
    """

    def of_group(group: torch.Tensor) -> torch.Tensor:
        if leave_one_out:
            return _leave_one_out(group, rounding=rounding, normalize=normalize)
        return _whole_group(group, rounding=rounding, normalize=normalize)

    rounding = 8 * torch.finfo(rewards.dtype).eps if rewards.is_floating_point() else 0.0
    return per_group(rewards, group_ids, valid, of_group)


def rloo_advantages(rewards: torch.Tensor, group_ids: Sequence[str], valid: torch.Tensor) -> torch.Tensor:
    """``r_i`` minus the mean of the other n − 1 valid members; no division; 0 for a group of one.

    Arguments, result and errors as in :func:`grpo_advantages`.

    Source: REINFORCE leave-one-out, arXiv:2402.14740.
    """
    return grpo_advantages(rewards, group_ids, valid, leave_one_out=True, normalize=False)


def dr_grpo_advantages(rewards: torch.Tensor, group_ids: Sequence[str], valid: torch.Tensor) -> torch.Tensor:
    """``r`` minus the mean of the n valid members; no division.

    Belongs with the loss normalisation ``"constant"``. Arguments, result and errors as in
    :func:`grpo_advantages`.

    Source: Dr. GRPO, arXiv:2503.20783.
    """
    return grpo_advantages(rewards, group_ids, valid, normalize=False)


def _whole_group(group: torch.Tensor, *, rounding: float, normalize: bool) -> torch.Tensor:
    centred = group - group.mean()
    std = (centred.square().sum() / (len(group) - 1)).sqrt()
    if std <= rounding * group.abs().max():
        return torch.zeros_like(group)
    return centred / (std + STD_EPSILON) if normalize else centred


def _leave_one_out(group: torch.Tensor, *, rounding: float, normalize: bool) -> torch.Tensor:
    count = len(group)
    # Row i of the matrix holds the other members' rewards relative to member i, so that neither
    # mean nor variance ever subtracts two large, nearly equal numbers.
    relative = group.unsqueeze(0) - group.unsqueeze(1)
    others = ~torch.eye(count, dtype=torch.bool, device=group.device)
    mean_of_others = (relative * others).sum(1) / (count - 1)
    advantages = -mean_of_others
    if normalize and count > 2:
        centred = torch.where(others, relative - mean_of_others.unsqueeze(1), 0.0)
        std = (centred.square().sum(1) / (count - 2)).sqrt()
        spread = std > rounding * group.abs().max()
        advantages = torch.where(spread, advantages / (std + STD_EPSILON), advantages)
    return advantages
