"""Advantages: what a rollout, or a token of it, is worth. One file per family."""

from .base import AdvantageError, AdvantageEstimator, AdvantageInputs
from .group_relative import GroupRelative, dr_grpo_advantages, grpo_advantages, rloo_advantages
from .messages import MessageOverrides

__all__ = [
    "AdvantageError",
    "AdvantageEstimator",
    "AdvantageInputs",
    "GroupRelative",
    "MessageOverrides",
    "dr_grpo_advantages",
    "grpo_advantages",
    "rloo_advantages",
]
