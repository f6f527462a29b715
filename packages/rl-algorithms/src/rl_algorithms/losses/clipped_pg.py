"""The clipped policy-gradient loss of PPO and GRPO with its usual variations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..batching import TrainBatch
from ..kl import KL_KINDS, KLEstimate, KLKind, kl_estimate
from ..metrics import Metric
from ..needs import Needs
from ..protocols import LogitsView
from .importance import IMPORTANCE_CORRECTIONS, ImportanceCorrection, ImportanceWeights, importance_weights
from .normalization import NORMALIZATIONS, LossError, Normalization, global_share, masked
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
        force_on_policy_ratio: the ratio is 1 with gradient (``prev`` is the current policy, without
            gradient); ``batch.prev_logprobs`` is not read.
        kl_coefficient: weight of the KL term against ``batch.reference_logprobs``; it carries
            gradient. 0 is off; then a batch with reference log-probabilities still reports ``kl``.
        kl_kind, kl_input_clamp, kl_output_clamp: see :func:`rl_algorithms.kl.kl_estimate`.
        entropy_coefficient: weight of the entropy bonus (subtracted). 0 is off.
        report_entropy: compute the entropy for the metrics alone.
        importance_correction: ``tis`` or ``icepop``: weight each token's policy term with
            ``exp(prev − generation)``, see :func:`rl_algorithms.losses.importance.importance_weights`.
            Needs ``importance_max``, ``icepop`` also ``importance_min`` (0 for ``tis`` if not given).
        normalization: ``token``, ``sequence`` or ``constant``; the denominators are in
            :func:`rl_algorithms.losses.normalization.global_share`.
        constant_length: tokens per sequence that ``constant`` divides by.

    The metrics are listed in :func:`rl_algorithms.losses.policy_metrics.policy_metrics`.

    Raises:
        LossError: at construction, settings out of range, half given or at odds; when called, a
            batch without the log-probabilities that the settings need.

    Sources: PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; asymmetric clip and token-level loss
    (DAPO), arXiv:2503.14476; constant normaliser (Dr. GRPO), arXiv:2503.20783.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    kl_coefficient: float = 0.0
    kl_kind: KLKind = "k3"
    kl_input_clamp: float = 20.0
    kl_output_clamp: float = 10.0
    entropy_coefficient: float = 0.0
    report_entropy: bool = False
    importance_correction: ImportanceCorrection | None = None
    importance_min: float | None = None
    importance_max: float | None = None
    normalization: Normalization = "token"
    constant_length: int | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_combinations(self)

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

        ratio = torch.exp((logprobs - prev).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
        objective = -advantages * logprobs if self.disable_ppo_ratio else self._clipped(ratio, advantages)
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
        return loss, metrics

    def _prev_logprobs(self, logprobs: torch.Tensor, mask: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        if self.force_on_policy_ratio:
            return logprobs.detach()
        if batch.prev_logprobs is None:
            raise LossError(
                "ClippedPGLoss got a batch without prev_logprobs: score it with the policy before the first "
                "update (TrainBatch.with_logprobs), or set force_on_policy_ratio"
            )
        return masked(batch.prev_logprobs, mask)

    def _clipped(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        term = torch.maximum(-advantages * ratio, -advantages * bounded)
        if self.dual_clip is not None:
            term = torch.where(advantages < 0, torch.minimum(term, -advantages * self.dual_clip), term)
        return term

    def _clip_binds(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
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


def _check_ranges(loss: ClippedPGLoss) -> None:
    def refuse(name: str, want: str) -> None:
        raise LossError(f"{name} must be {want}, got {getattr(loss, name)!r}")

    if not 0 <= loss.clip_low < 1:
        refuse("clip_low", "in [0, 1)")
    for name in ("clip_high", "kl_coefficient", "entropy_coefficient"):
        if not 0 <= getattr(loss, name) < math.inf:
            refuse(name, "a finite number >= 0")
    for name in ("kl_input_clamp", "kl_output_clamp"):
        if not 0 < getattr(loss, name) < math.inf:
            refuse(name, "a finite number > 0")
    if loss.dual_clip is not None and not 1 < loss.dual_clip < math.inf:
        refuse("dual_clip", "a finite number > 1, or None")
    if loss.constant_length is not None and loss.constant_length < 1:
        refuse("constant_length", "at least 1")
    for name, known in (
        ("kl_kind", KL_KINDS),
        ("normalization", NORMALIZATIONS),
        ("importance_correction", (None, *IMPORTANCE_CORRECTIONS)),
    ):
        if getattr(loss, name) not in known:
            refuse(name, f"one of {', '.join(str(k) for k in known)}")


def _check_combinations(loss: ClippedPGLoss) -> None:
    if loss.disable_ppo_ratio and loss.force_on_policy_ratio:
        raise LossError("disable_ppo_ratio and force_on_policy_ratio exclude each other: choose one")
    if loss.disable_ppo_ratio and loss.dual_clip is not None:
        raise LossError("dual_clip has no effect with disable_ppo_ratio: drop one of them")
    if (loss.normalization == "constant") != (loss.constant_length is not None):
        raise LossError(
            f"normalization {loss.normalization!r} with constant_length {loss.constant_length}: 'constant' "
            "and constant_length are given together or not at all"
        )
    low, high = loss.importance_min, loss.importance_max
    if loss.importance_correction is None:
        if low is not None or high is not None:
            raise LossError(f"importance bounds {low}..{high} without importance_correction: say which one")
        return
    if high is None:
        raise LossError(f"importance_correction {loss.importance_correction!r} needs importance_max")
    if low is None and loss.importance_correction == "icepop":
        raise LossError("importance_correction 'icepop' needs importance_min")
    if not 0 <= (low or 0.0) <= high < math.inf or high == 0:
        raise LossError(f"importance bounds must satisfy 0 <= min <= max, 0 < max < inf; got {low}..{high}")
