"""How far a student is from a teacher, seen through the teacher's most likely tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .protocols import Batch, Teacher

Divergence = Literal["forward", "reverse", "mixed"]
DIVERGENCES: tuple[Divergence, ...] = ("forward", "reverse", "mixed")
Outside = Literal["tail", "zero"]
OUTSIDE: tuple[Outside, ...] = ("tail", "zero")


class DistillationError(ValueError):
    """Teacher and student that do not fit, or settings that cannot be meant; names them and the remedy."""


def check_divergence(kind: str, forward_weight: float, outside: str) -> None:
    """That there is such a divergence.

    Raises:
        DistillationError: there is none; names what may be chosen.
    """
    if kind not in DIVERGENCES or outside not in OUTSIDE or not 0 <= forward_weight <= 1:
        raise DistillationError(
            f"divergence {kind!r}, outside {outside!r}, forward_weight {forward_weight}: choose of "
            f"{', '.join(DIVERGENCES)}; of {', '.join(OUTSIDE)}; a weight in [0, 1]"
        )


def topk_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    kind: Divergence = "reverse",
    forward_weight: float = 0.5,
    outside: Outside = "tail",
) -> torch.Tensor:
    """Divergence at each position; no reduction, hence no denominator.

    With p the probabilities over the *whole* vocabulary at the K tokens of the support: forward is
    ``Σ p_T (log p_T − log p_S)``, reverse ``Σ p_S (log p_S − log p_T)``, mixed
    ``w·forward + (1 − w)·reverse``. ``tail`` adds one bin for all other tokens, ``1 − Σ p`` on both sides: a
    divergence of two distributions, never negative but for rounding. ``zero`` leaves them out. The gradient
    flows through ``student`` and is never cut off by a bound at 0.

    Args:
        student: ``[..., K]`` log-probabilities, differentiable.
        teacher: ``[..., K]`` of the same tokens.
        kind, forward_weight: which divergence; the weight w is of ``mixed``.
        outside: what is done about tokens outside the support.

    Returns:
        ``[...]``, in nats.

    Raises:
        DistillationError: shapes that differ, an unknown kind, or a weight outside [0, 1].

    Sources: sequence-level and on-policy distillation with these divergences (GKD), arXiv:2306.13649; the
    reverse one, MiniLLM, arXiv:2306.08543.
    """
    if student.shape != teacher.shape:
        raise DistillationError(
            f"student {list(student.shape)} and teacher {list(teacher.shape)} must be of the same tokens"
        )
    check_divergence(kind, forward_weight, outside)
    teacher = teacher.detach()
    if outside == "tail":
        student = torch.cat([student, _tail(student)], -1)
        teacher = torch.cat([teacher, _tail(teacher)], -1)
    difference = student - teacher
    forward = -(teacher.exp() * difference).sum(-1)
    if kind == "forward":
        return forward
    reverse = (student.exp() * difference).sum(-1)
    if kind == "reverse":
        return reverse
    return forward_weight * forward + (1 - forward_weight) * reverse


def _tail(logprobs: torch.Tensor) -> torch.Tensor:
    """``[..., 1]`` log of the probability that is not among the K tokens."""
    # Probabilities add up to 1 within about eps: a smaller tail cannot be told from none.
    smallest = torch.finfo(logprobs.dtype).eps
    return (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=smallest).log()


@dataclass(frozen=True)
class TaskTeachers:
    """A teacher for each task: rows go to the one that their environment names.

    Attributes:
        by_agent: teachers by the name of an environment.
        otherwise: of all other rows; ``None`` refuses them.
    """

    by_agent: Mapping[str, Teacher]
    otherwise: Teacher | None = None

    def logprobs(self, batch: Batch, agents: Sequence[str]) -> torch.Tensor:
        """See :meth:`rl_algorithms.protocols.Teacher.logprobs`."""
        found = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        for teacher, rows, part, names in self._parts(batch, agents):
            values = teacher.logprobs(part, names).cpu()
            found[rows, : values.shape[1]] = values
        return found

    def topk_logprobs(self, batch: Batch, agents: Sequence[str], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rl_algorithms.protocols.Teacher.topk_logprobs`."""
        logprobs = torch.zeros((*batch.input_ids.shape, k), dtype=torch.float32)
        ids = torch.zeros((*batch.input_ids.shape, k), dtype=torch.int64)
        for teacher, rows, part, names in self._parts(batch, agents):
            values, tokens = teacher.topk_logprobs(part, names, k)
            logprobs[rows, : values.shape[1]] = values.cpu()
            ids[rows, : tokens.shape[1]] = tokens.cpu()
        return logprobs, ids

    def _parts(
        self, batch: Batch, agents: Sequence[str]
    ) -> list[tuple[Teacher, list[int], Batch, list[str]]]:
        rows_of: dict[str, list[int]] = {}
        for row, agent in enumerate(agents):
            rows_of.setdefault(agent if agent in self.by_agent else "", []).append(row)
        parts = []
        for agent, rows in rows_of.items():
            teacher = self.by_agent.get(agent, self.otherwise)
            if teacher is None:
                raise DistillationError(
                    f"no teacher for the environment {agents[rows[0]] or 'without a name'!r}; there are "
                    f"teachers for {', '.join(sorted(self.by_agent))}: name one for it, or one for all others"
                )
            parts.append((teacher, rows, batch.select(rows), [agents[row] for row in rows]))
        return parts
