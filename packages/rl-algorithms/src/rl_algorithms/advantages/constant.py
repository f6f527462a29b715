"""The advantage of methods that judge by a teacher instead of rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..needs import Needs
from .base import AdvantageInputs


@dataclass(frozen=True, slots=True)
class Constant:
    """1 for every valid rollout, whether or not it has a reward."""

    needs = Needs()
    uses_rewards = False

    def __call__(self, inputs: AdvantageInputs) -> torch.Tensor:
        return inputs.valid.to(torch.float64)
