"""Supervised fine-tuning: the negative log-likelihood of the masked-in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batching import TrainBatch
from ..metrics import Mean, Metric, Sum
from ..protocols import LogitsView
from .normalization import global_share, masked


@dataclass(frozen=True, slots=True)
class SFTLoss:
    """Σ m·(−lp) / valid tokens of the whole batch.

    Metrics: ``loss`` (the share; shares add up), ``nll`` (per valid token), ``valid_tokens``,
    ``valid_samples``.
    """

    def __call__(self, logits: LogitsView, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        logprobs = logits.logprobs()
        batch = batch.to(logprobs.device)
        mask = batch.loss_mask
        nll = -masked(logprobs, mask)
        loss = global_share(nll, mask, batch, "token")
        share, total, tokens, samples = torch.stack(
            [loss.detach().double(), nll.detach().double().sum(), mask.sum(), mask.any(1).sum()]
        ).tolist()
        return loss, {
            "loss": Sum(share),
            "nll": Mean(total, tokens),
            "valid_tokens": Sum(tokens),
            "valid_samples": Sum(samples),
        }
