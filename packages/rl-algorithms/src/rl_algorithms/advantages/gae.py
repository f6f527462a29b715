"""Generalised advantage estimation from a value head's outputs."""

from __future__ import annotations

import torch


def gae_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of every trained token.

    ``δ_t = r_t + γ·V_{t+1} − V_t`` and ``A_t = δ_t + γ·λ·A_{t+1}``, where t + 1 is the *next trained
    token* of the row: what an environment says in between is neither an action nor time that passes. After
    a row's last trained token nothing follows (V = A = 0). No reduction, hence no denominator.

    Args:
        rewards: ``[B, S]``, paid at each token, or ``[B]``, paid at the last trained token of each row.
        values: ``[B, S]``, the expected return before each token is chosen.
        mask: ``[B, S]`` bool, the trained tokens; anything may stand elsewhere.
        gamma, lam: in [0, 1].

    Returns:
        Advantages and returns ``A_t + V_t``, ``[B, S]`` float64, 0 outside the mask.

    Raises:
        ValueError: shapes that do not fit, or a factor outside [0, 1].

    Source: arXiv:1506.02438, equations 11 to 16.
    """
    if mask.ndim != 2 or values.shape != mask.shape or mask.dtype != torch.bool:
        raise ValueError(f"values {list(values.shape)} and a bool mask {list(mask.shape)} must be [B, S]")
    if rewards.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"rewards must be {list(mask.shape)} or {list(mask.shape[:1])}, got {list(rewards.shape)}"
        )
    if not 0 <= gamma <= 1 or not 0 <= lam <= 1:
        raise ValueError(f"gamma and lam must lie in [0, 1], got {gamma} and {lam}")
    values = torch.where(mask, values.detach().double(), 0.0)
    paid = torch.where(mask, _at_tokens(rewards, mask), 0.0)
    advantages = torch.zeros_like(values)
    following = torch.zeros(2, len(mask), dtype=torch.float64, device=mask.device)
    for token in range(mask.shape[1] - 1, -1, -1):
        here, (next_value, next_advantage) = mask[:, token], following
        delta = paid[:, token] + gamma * next_value - values[:, token]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, token] = torch.where(here, advantage, 0.0)
        following = torch.where(here, torch.stack([values[:, token], advantage]), following)
    return advantages, torch.where(mask, advantages + values, 0.0)


def _at_tokens(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rewards = rewards.detach().double()
    if rewards.ndim == 2:
        return rewards
    places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = torch.where(mask, places, -1).max(1, keepdim=True).values if mask.shape[1] else places[:, :1]
    return torch.where(places == last, rewards.unsqueeze(1), 0.0)
