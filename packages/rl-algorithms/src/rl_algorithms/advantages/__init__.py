"""Advantages: what a rollout, or a token of it, is worth. One file per family."""

from .base import AdvantageError, AdvantageEstimator, AdvantageInputs
from .constant import Constant
from .group_relative import GroupRelative, dr_grpo_advantages, grpo_advantages, rloo_advantages
from .messages import MessageOverrides
from .opd import OnPolicyDistillation

__all__ = [
    "AdvantageError",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Constant",
    "GroupRelative",
    "MessageOverrides",
    "OnPolicyDistillation",
    "dr_grpo_advantages",
    "grpo_advantages",
    "rloo_advantages",
]
