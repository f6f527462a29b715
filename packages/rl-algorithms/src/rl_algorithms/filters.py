"""Which samples and groups are worth training on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_gym_bridge.trajectory import StopReason

from .advantages.groups import has_spread, members_by_group


def not_truncated(stop_reasons: Sequence[StopReason]) -> torch.Tensor:
    """``[N]`` bool, false where the policy was cut off. Overlong filtering masks those samples out.

    They keep their place in the baseline: give this to the batch's sample mask, not to the
    advantages' ``valid``. Decided by the stop reason alone, never by a length or the last token.
    """
    return torch.tensor([not reason.truncated for reason in stop_reasons], dtype=torch.bool)


def zero_spread_groups(
    unshaped_rewards: torch.Tensor, group_ids: Sequence[str], valid: torch.Tensor
) -> frozenset[str]:
    """Ids of the groups whose valid members all earned the same: nothing to learn from a comparison.

    Judged by the rewards *before* shaping, else a length penalty makes an all-wrong group look
    informative. A group with one valid member, or none, is among them.

    Args:
        unshaped_rewards: ``[N]`` floating point.
        group_ids: N ids.
        valid: ``[N]`` bool.
    """
    members = members_by_group(group_ids, valid)
    return frozenset(
        group
        for group in set(group_ids)
        if group not in members or not has_spread(unshaped_rewards[members[group]])
    )
