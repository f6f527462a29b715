"""Groups of rollouts: who belongs together, and whether their rewards differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def members_by_group(group_ids: Sequence[str], valid: torch.Tensor) -> dict[str, list[int]]:
    """Indices of the valid members of each group that has any, in order of first appearance."""
    members: dict[str, list[int]] = {}
    for index, (group, keep) in enumerate(zip(group_ids, valid.tolist(), strict=True)):
        if keep:
            members.setdefault(group, []).append(index)
    return members


def has_spread(rewards: torch.Tensor) -> bool:
    """Whether ``[n]`` rewards differ beyond the rounding of their dtype."""
    if rewards.numel() < 2:
        return False
    exact = rewards.double()
    tolerance = 8 * torch.finfo(rewards.dtype).eps * float(exact.abs().max())
    return float(exact.max() - exact.min()) > tolerance


def per_group(
    rewards: torch.Tensor,
    group_ids: Sequence[str],
    valid: torch.Tensor,
    of_group: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be a floating-point vector, got {rewards.dtype} {list(rewards.shape)}"
        )
    if valid.shape != rewards.shape or valid.dtype != torch.bool or len(group_ids) != len(rewards):
        raise ValueError(
            f"{len(rewards)} rewards need as many group ids and bool flags, got {len(group_ids)} ids and "
            f"{valid.dtype} {list(valid.shape)}"
        )
    exact = rewards.detach().double()
    broken = (valid & ~torch.isfinite(exact)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"rewards {broken} are valid but not finite: mark them invalid or repair the verifier"
        )
    advantages = torch.zeros_like(exact)
    for indices in members_by_group(group_ids, valid).values():
        if len(indices) > 1:
            where = torch.tensor(indices, device=exact.device)
            advantages[where] = of_group(exact[where])
    return advantages.to(rewards.dtype)
