"""Direct preference optimisation: of two answers to a prompt, prefer the chosen one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batching import TrainBatch
from ..metrics import Mean, Metric, Sum
from ..needs import Needs
from ..protocols import LogitsView
from .normalization import LossError, masked

# A preference that is certain still has a sign, and in float32, which weights are kept in, a logarithm.
_SMALLEST = 1e-12
_MOST_CERTAIN = 1 - 2.0**-24


@dataclass(frozen=True, slots=True)
class DPOLoss:
    """``−log σ(β·Δ)`` per pair, ``Δ = (lp − ref)(chosen) − (lp − ref)(rejected)``, summed over tokens.

    A micro-batch may hold one answer of a pair without the other, so the pair's ``Δ`` is computed before it
    is cut up (:meth:`prepare`, from the policy's own log-probabilities at the start of the update) and each
    answer then has a term of its own: its half of the value, and exactly its part of the gradient,
    ``∓β·σ(−β·Δ)·∇lp``. For one update per scoring, as any batch has, this is DPO's gradient; there is no
    second-order approximation in it.

    Denominator: the number of pairs in the whole batch, half its valid rows.

    Attributes:
        beta: β > 0, how strongly the reference holds the policy back.

    The value is made of that weight, so it is at most 16.6, which it reaches at β·Δ = −16.6; the gradient
    is exact everywhere.

    Metrics: ``loss`` (the share; shares add up), ``preferred`` (share of answers in pairs whose chosen one
    has the larger margin), ``valid_samples``, ``valid_tokens``.

    Raises:
        LossError: β out of range, or pairs that are none.

    Source: arXiv:2305.18290, equations 7 and 8.
    """

    beta: float = 0.1

    needs = Needs(prev=True, reference=True)
    trains_zero_advantage_rows = False

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise LossError(f"beta must be a finite number > 0, got {self.beta}")

    def prepare(self, batch: TrainBatch, pairs: Sequence[tuple[int, int]]) -> TrainBatch:
        """The whole batch with ``±β·σ(−β·Δ)`` for advantages, ``[B]``: plus for chosen answers.

        Args:
            batch: scored by the policy and by the reference.
            pairs: row of the chosen and row of the rejected answer, of each pair; every valid row once.
        """
        if batch.prev_logprobs is None or batch.reference_logprobs is None:
            raise LossError(
                "DPOLoss.prepare got a batch that was not scored: add the policy's and the reference's "
                "log-probabilities first (TrainBatch.with_logprobs)"
            )
        mask = batch.loss_mask
        valid = set(mask.any(1).nonzero().flatten().tolist())
        paired = [row for pair in pairs for row in pair]
        if len(set(paired)) != len(paired) or set(paired) != valid:
            raise LossError(
                f"pairs name rows {sorted(paired)}, and the rows to train are {sorted(valid)}: each belongs "
                "to exactly one pair; mask out an answer whose partner is missing"
            )
        margins = masked(batch.prev_logprobs - batch.reference_logprobs, mask).double().sum(1)
        weights = torch.zeros(len(batch), dtype=torch.float64, device=margins.device)
        for chosen, rejected in pairs:
            weight = self.beta * torch.sigmoid(-self.beta * (margins[chosen] - margins[rejected]))
            # Not 0: the sign says which answer it is.
            weight = weight.clamp(min=self.beta * _SMALLEST)
            weights[chosen], weights[rejected] = weight, -weight
        return batch.with_advantages(weights)

    def __call__(self, logits: LogitsView, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        logprobs = logits.logprobs()
        batch = batch.to(logprobs.device)
        if batch.advantages.ndim != 1:
            raise LossError("DPOLoss needs one weight per row: DPOLoss.prepare makes them")
        mask = batch.loss_mask
        rows = mask.any(1)
        weights = torch.where(rows, batch.advantages, 0.0)
        sums = masked(logprobs, mask).sum(1)
        # −log σ(βΔ) from the weight that it goes with: σ(−βΔ) = |weight| / β.
        against = (weights.abs().double() / self.beta).clamp(max=1.0)
        values = -torch.log1p(-against.clamp(max=_MOST_CERTAIN)) * rows / 2
        pairs = batch.global_valid_samples / 2 or 1.0
        moving = (-weights * (sums - sums.detach())).sum()
        loss = (values.sum().to(moving.dtype) + moving) / pairs
        count = float(rows.sum())
        return loss, {
            "loss": Sum(float(loss.detach())),
            "preferred": Mean(float((rows & (against < 0.5)).sum()), count),
            "valid_samples": Sum(count),
            "valid_tokens": Sum(float(mask.sum())),
        }
