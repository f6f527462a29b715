"""Advantages: what a rollout, or a token of it, is worth. One file per family."""

from .base import AdvantageError, AdvantageEstimator, AdvantageInputs
from .constant import Constant
from .gae import gae_advantages
from .gdpo import GDPO
from .group_relative import GroupRelative, dr_grpo_advantages, grpo_advantages, rloo_advantages
from .kl_in_reward import KLInReward
from .messages import MessageOverrides
from .opd import OnPolicyDistillation
from .reinforce_plus_plus import ReinforcePlusPlus

__all__ = [
    "GDPO",
    "AdvantageError",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Constant",
    "GroupRelative",
    "KLInReward",
    "MessageOverrides",
    "OnPolicyDistillation",
    "ReinforcePlusPlus",
    "dr_grpo_advantages",
    "gae_advantages",
    "grpo_advantages",
    "rloo_advantages",
]
