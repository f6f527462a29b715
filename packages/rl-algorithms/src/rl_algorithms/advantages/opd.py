"""On-policy distillation as reinforcement: a token is worth what the teacher thinks more of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..needs import Needs
from .base import AdvantageError, AdvantageInputs


@dataclass(frozen=True, slots=True)
class OnPolicyDistillation:
    """``log p_T − log p_S`` of each sampled token, ``[N, S]``; no baseline, no division.

    The student is the policy at the start of the step. In expectation over its own samples the sum is
    minus the reverse KL to the teacher. No denominator of its own: the loss divides.

    Source: on-policy distillation as a policy gradient of the reverse KL, arXiv:2306.08543, section 2.2.
    """

    needs = Needs(prev=True, teacher=True)
    uses_rewards = False

    def __call__(self, inputs: AdvantageInputs) -> torch.Tensor:
        teacher, student = inputs.batch.teacher_logprobs, inputs.batch.prev_logprobs
        if teacher is None or student is None:
            raise AdvantageError(
                "on-policy distillation got a batch without the teacher's and the policy's log-probabilities"
            )
        difference = torch.where(inputs.batch.token_mask, teacher - student, 0.0)
        return torch.where(inputs.valid.unsqueeze(1), difference, 0.0)
