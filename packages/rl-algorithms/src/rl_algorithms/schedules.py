"""Learning rates as pure functions of the step, so that a resumed run needs to restore nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]
DECAYS: tuple[Decay, ...] = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Linear warm-up to ``peak``, then constant, or a linear or cosine descent to a floor.

    Steps count from 1. During warm-up step s has ``peak · s / warmup_steps``; the descent starts
    after it and reaches ``peak · floor`` at ``total_steps``, where it stays.

    Attributes:
        peak: highest rate, ≥ 0.
        warmup_steps: 0 starts at the peak.
        decay: ``constant``, ``linear`` or ``cosine``.
        total_steps: where a descent ends; not used by ``constant``.
        floor: share of the peak, in [0, 1], that a descent ends at.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    peak: float
    warmup_steps: int = 0
    decay: Decay = "constant"
    total_steps: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.peak < math.inf:
            raise ValueError(f"learning rate must be a finite number >= 0, got {self.peak}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be >= 0, got {self.warmup_steps}")
        if self.decay not in DECAYS:
            raise ValueError(f"decay {self.decay!r} is unknown; choose one of {', '.join(DECAYS)}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must lie in [0, 1], got {self.floor}")
        if self.decay != "constant" and (self.total_steps is None or self.total_steps < 1):
            raise ValueError(f"a {self.decay} decay needs total_steps >= 1, got {self.total_steps}")

    def __call__(self, step: int) -> float:
        """The rate of the update(s) of ``step`` ≥ 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.decay == "constant" or self.total_steps is None:
            return self.peak
        span = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / span, 1.0)
        remaining = 1 - progress if self.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (self.floor + (1 - self.floor) * remaining)
