"""On-policy distillation: the student's own answers, judged token by token by a teacher."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batching import TrainBatch
from ..distillation import DistillationError, Divergence, Outside, check_divergence, topk_divergence
from ..metrics import Max, Mean, Metric, Sum
from ..needs import Needs
from ..protocols import LogitsView
from .normalization import NORMALIZATIONS, LossError, Normalization, global_share, masked


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """The divergence of student and teacher over the teacher's k most likely tokens, at each sampled token.

    Attributes:
        k: size of the support.
        divergence: ``forward``, ``reverse`` or ``mixed``, see
            :func:`rl_algorithms.distillation.topk_divergence`.
        forward_weight: of ``mixed``.
        outside: ``tail`` (one bin for all other tokens) or ``zero`` (leave them out).
        normalization: ``token`` or ``sequence``; the denominators are in
            :func:`rl_algorithms.losses.normalization.global_share`.

    Metrics: ``loss`` (the share; shares add up), ``divergence`` and ``divergence_max`` (nats per valid
    token), ``teacher_mass`` and ``student_mass`` (probability in the support, means over valid tokens),
    ``valid_tokens``, ``valid_samples``.

    Raises:
        LossError: at construction, settings out of range; when called, a batch without a teacher's tokens.

    Source: on-policy distillation (GKD), arXiv:2306.13649.
    """

    k: int = 64
    divergence: Divergence = "reverse"
    forward_weight: float = 0.5
    outside: Outside = "tail"
    normalization: Normalization = "token"

    trains_zero_advantage_rows = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise LossError(f"k must be at least 1, got {self.k}")
        try:
            check_divergence(self.divergence, self.forward_weight, self.outside)
        except DistillationError as error:
            raise LossError(str(error)) from error
        if self.normalization not in NORMALIZATIONS or self.normalization == "constant":
            raise LossError(f"normalization must be token or sequence, got {self.normalization!r}")

    @property
    def needs(self) -> Needs:
        """What a batch must carry: the teacher's k most likely tokens."""
        return Needs(teacher_topk=self.k)

    def __call__(self, logits: LogitsView, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        if batch.teacher_topk_ids is None or batch.teacher_topk_logprobs is None:
            raise LossError(
                "DistillationLoss got a batch without a teacher's tokens: ask one first "
                "(TrainBatch.with_teacher_topk)"
            )
        student = logits.logprobs_of(batch.teacher_topk_ids)
        batch = batch.to(student.device)
        mask = batch.loss_mask
        assert batch.teacher_topk_logprobs is not None
        # Constants where nothing is trained: padding may hold anything.
        nowhere = ~mask.unsqueeze(2)
        student = student.masked_fill(nowhere, 0.0)
        teacher = batch.teacher_topk_logprobs.masked_fill(nowhere, 0.0)
        divergence = masked(
            topk_divergence(
                student,
                teacher,
                kind=self.divergence,
                forward_weight=self.forward_weight,
                outside=self.outside,
            ),
            mask,
        )
        loss = global_share(divergence, mask, batch, self.normalization)
        return loss, _metrics(loss, divergence, student, teacher, mask)


@torch.no_grad()
def _metrics(
    loss: torch.Tensor,
    divergence: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, Metric]:
    mass = [masked(values.exp().sum(2), mask).double().sum() for values in (student, teacher)]
    numbers = [loss, divergence.sum(dtype=torch.float64), *mass, mask.sum(), mask.any(1).sum()]
    share, total, student_mass, teacher_mass, tokens, samples = torch.stack(
        [number.double() for number in numbers]
    ).tolist()
    largest = float(divergence[mask].max()) if tokens else 0.0
    return {
        "loss": Sum(share),
        "divergence": Mean(total, tokens),
        "divergence_max": Max(largest),
        "student_mass": Mean(student_mass, tokens),
        "teacher_mass": Mean(teacher_mass, tokens),
        "valid_tokens": Sum(tokens),
        "valid_samples": Sum(samples),
    }
