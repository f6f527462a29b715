"""The clipped policy-gradient loss of PPO and GRPO with its usual variations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batching import TrainBatch
from ..kl import KLEstimate, KLKind, kl_estimate
from ..metrics import Mean, Metric
from ..needs import Needs
from ..protocols import LogitsView
from .clipped_pg_checks import check_combinations, check_ranges
from .importance import ImportanceCorrection, ImportanceWeights, importance_weights
from .normalization import LossError, Normalization, global_share, masked
from .policy_metrics import policy_metrics

# exp(20) is 5e8: far beyond any ratio that means something, far below overflow in float32.
LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True, slots=True)
class ClippedPGLoss:
    """``max(−A·ratio, −A·clip(ratio, 1 − clip_low, 1 + clip_high))`` with ``ratio = exp(lp − prev)``.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
        dual_clip: c > 1; for A < 0 the term is at most ``−A·c``. ``None`` is off.
        disable_ppo_ratio: REINFORCE, the term is ``−A·lp``; nothing is clipped.
        sequence_ratio: GSPO: the ratio of every token is ``exp`` of the *mean* log-ratio over the sequence's
            trained tokens; each token's gradient is its own. Needs ``normalization`` ``sequence``.
        cispo: the term is ``−A·stopgrad(clip(ratio))·lp``: a clipped token keeps its gradient.
        force_on_policy_ratio: the ratio is 1 with gradient (``prev`` is the current policy, without
            gradient); ``batch.prev_logprobs`` is not read.
        kl_coefficient: weight of the KL term against ``batch.reference_logprobs``; it carries
            gradient. 0 is off; then a batch with reference log-probabilities still reports ``kl``.
        kl_kind, kl_input_clamp, kl_output_clamp: see :func:`rl_algorithms.kl.kl_estimate`.
        entropy_coefficient: weight of the entropy bonus (subtracted). 0 is off.
        report_entropy: compute the entropy for the metrics alone.
        positive_nll_coefficient: weight of the negative log-likelihood of tokens with a positive advantage,
            divided by the number of such tokens in the whole batch. 0 is off.
        importance_correction: ``tis``, ``icepop`` or ``seq-mask-tis``: weight each token's policy term with
            ``exp(prev − generation)``, see :func:`rl_algorithms.losses.importance.importance_weights`.
            Needs ``importance_max``, all but ``tis`` also ``importance_min`` (0 for ``tis`` if not given).
        normalization: ``token``, ``sequence`` or ``constant``; the denominators are in
            :func:`rl_algorithms.losses.normalization.global_share`.
        constant_length: tokens per sequence that ``constant`` divides by.

    The metrics are listed in :func:`rl_algorithms.losses.policy_metrics.policy_metrics`.

    Raises:
        LossError: at construction, settings out of range, half given or at odds; when called, a
            batch without the log-probabilities that the settings need.

    Sources: PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; asymmetric clip and token-level loss
    (DAPO), arXiv:2503.14476; constant normaliser (Dr. GRPO), arXiv:2503.20783; GSPO, arXiv:2507.18071,
    equations 5 and 14; CISPO, arXiv:2506.13585, equation 4; likelihood of positive examples (VAPO),
    arXiv:2504.05118.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    sequence_ratio: bool = False
    cispo: bool = False
    kl_coefficient: float = 0.0
    kl_kind: KLKind = "k3"
    kl_input_clamp: float = 20.0
    kl_output_clamp: float = 10.0
    entropy_coefficient: float = 0.0
    report_entropy: bool = False
    positive_nll_coefficient: float = 0.0
    importance_correction: ImportanceCorrection | None = None
    importance_min: float | None = None
    importance_max: float | None = None
    normalization: Normalization = "token"
    constant_length: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        check_combinations(self)

    @property
    def needs(self) -> Needs:
        """Log-probabilities that a batch must carry."""
        return Needs(prev=not self.force_on_policy_ratio, reference=self.kl_coefficient > 0)

    @property
    def trains_zero_advantage_rows(self) -> bool:
        """Whether a row with advantage 0 has a gradient all the same."""
        return self.kl_coefficient > 0 or self.entropy_coefficient != 0

    def __call__(self, logits: LogitsView, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        raw_logprobs = logits.logprobs()
        batch = batch.to(raw_logprobs.device)
        mask = batch.loss_mask
        logprobs = masked(raw_logprobs, mask)
        prev = self._prev_logprobs(logprobs, mask, batch)
        generation = masked(batch.generation_logprobs, mask)
        advantages = masked(batch.token_advantages, mask)

        ratio = self._ratio(logprobs, prev, mask)
        objective = self._objective(ratio, logprobs, advantages)
        weights = self._importance_weights(prev, generation, mask)
        if weights is not None:
            objective = objective * weights.values
        kl = self._kl(logprobs, mask, batch)
        if kl is not None and self.kl_coefficient > 0:
            objective = objective + self.kl_coefficient * kl.values
        entropy = None
        if self.entropy_coefficient != 0 or self.report_entropy:
            entropy = masked(logits.entropy(), mask)
            objective = objective - self.entropy_coefficient * entropy

        loss = global_share(objective, mask, batch, self.normalization, self.constant_length)
        positive = None
        if self.positive_nll_coefficient > 0:
            positive = torch.where(mask & (advantages > 0), -logprobs, 0.0).sum()
            loss = loss + self.positive_nll_coefficient * positive / (batch.global_positive_tokens or 1.0)
        metrics = policy_metrics(
            loss=loss,
            mask=mask,
            logprobs=logprobs,
            prev_logprobs=prev,
            generation_logprobs=generation,
            ratio=ratio,
            clipped=None if self.disable_ppo_ratio else self._clip_binds(ratio, advantages),
            weights=weights,
            kl=kl,
            entropy=entropy,
        )
        if positive is not None:
            count = float((mask & (advantages > 0)).sum())
            metrics["positive_nll"] = Mean(float(positive.detach()), count)
        return loss, metrics

    @property
    def one_update_only(self) -> bool:
        """Whether a second update on the same samples would not be corrected for the first."""
        return self.disable_ppo_ratio or self.force_on_policy_ratio

    def _prev_logprobs(self, logprobs: torch.Tensor, mask: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        if self.force_on_policy_ratio:
            return logprobs.detach()
        if batch.prev_logprobs is None:
            raise LossError(
                "ClippedPGLoss got a batch without prev_logprobs: score it with the policy before the first "
                "update (TrainBatch.with_logprobs), or set force_on_policy_ratio"
            )
        return masked(batch.prev_logprobs, mask)

    def _ratio(self, logprobs: torch.Tensor, prev: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        log_ratio = logprobs - prev
        if self.sequence_ratio:
            counts = mask.sum(1, keepdim=True).clamp(min=1)
            mean = (masked(log_ratio, mask).sum(1, keepdim=True) / counts).detach()
            # The value of the mean with each token's own gradient.
            log_ratio = mean + (logprobs - logprobs.detach())
        return torch.exp(log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))

    def _objective(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        if self.disable_ppo_ratio:
            return -advantages * logprobs
        if self.cispo:
            return -advantages * ratio.detach().clamp(1 - self.clip_low, 1 + self.clip_high) * logprobs
        return self._clipped(ratio, advantages)

    def _clipped(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        term = torch.maximum(-advantages * ratio, -advantages * bounded)
        if self.dual_clip is not None:
            term = torch.where(advantages < 0, torch.minimum(term, -advantages * self.dual_clip), term)
        return term

    def _clip_binds(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        if self.cispo:
            # Its weight is clipped on both sides, whatever the advantage.
            return (advantages != 0) & ((ratio > 1 + self.clip_high) | (ratio < 1 - self.clip_low))
        rises = (advantages > 0) & (ratio > 1 + self.clip_high)
        falls = (advantages < 0) & (ratio < 1 - self.clip_low)
        if self.dual_clip is None:
            return rises | falls
        return rises | falls | ((advantages < 0) & (ratio > self.dual_clip))

    def _importance_weights(
        self, prev: torch.Tensor, generation: torch.Tensor, mask: torch.Tensor
    ) -> ImportanceWeights | None:
        if self.importance_correction is None or self.importance_max is None:
            return None
        return importance_weights(
            prev,
            generation,
            mask,
            kind=self.importance_correction,
            minimum=self.importance_min or 0.0,
            maximum=self.importance_max,
        )

    def _kl(self, logprobs: torch.Tensor, mask: torch.Tensor, batch: TrainBatch) -> KLEstimate | None:
        if batch.reference_logprobs is None:
            if self.kl_coefficient > 0:
                raise LossError(
                    f"ClippedPGLoss with kl_coefficient {self.kl_coefficient} got a batch without "
                    "reference_logprobs: score it with the reference policy (TrainBatch.with_logprobs)"
                )
            return None
        return kl_estimate(
            logprobs if self.kl_coefficient > 0 else logprobs.detach(),
            batch.reference_logprobs,
            mask,
            kind=self.kl_kind,
            input_clamp=self.kl_input_clamp,
            output_clamp=self.kl_output_clamp,
        )
