"""From what an environment pays to what a policy is trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_gym_bridge.trajectory import Trajectory


class RewardError(ValueError):
    """Shaping settings that make no sense; names the offender."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Maps ``[source_min, source_max]`` linearly onto ``[target_min, target_max]``, clamped to it.

    Raises:
        RewardError: an empty source range, or a bound that is not finite.
    """

    source_min: float
    source_max: float
    target_min: float
    target_max: float

    def __post_init__(self) -> None:
        bounds = (self.source_min, self.source_max, self.target_min, self.target_max)
        if not all(math.isfinite(bound) for bound in bounds):
            raise RewardError(f"reward scaling needs finite bounds, got {bounds}")
        if self.target_min == self.target_max:
            raise RewardError(
                f"target_min and target_max are both {self.target_min}: nothing would be told apart"
            )
        if self.source_min >= self.source_max:
            raise RewardError(f"source_min {self.source_min} must lie below source_max {self.source_max}")

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        share = ((rewards - self.source_min) / (self.source_max - self.source_min)).clamp(0, 1)
        return self.target_min + share * (self.target_max - self.target_min)


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """``min(−(length − (max_length − buffer)) / buffer · penalty, 0)``, never below ``−penalty``.

    Lengths count sampled tokens; of several turns the longest counts, as each has ``max_length`` of its own.

    Raises:
        RewardError: unless 0 < buffer ≤ max_length and penalty ≥ 0.

    Source: soft overlong punishment of DAPO, arXiv:2503.14476, equation 13.
    """

    max_length: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_length or not 0 <= self.penalty < math.inf:
            raise RewardError(
                "overlong penalty needs 0 < buffer <= max_length and penalty >= 0, got "
                f"buffer {self.buffer}, max_length {self.max_length}, penalty {self.penalty}"
            )

    def __call__(self, lengths: torch.Tensor) -> torch.Tensor:
        excess = lengths.double() - (self.max_length - self.buffer)
        return (-excess / self.buffer * self.penalty).clamp(-self.penalty, 0)


@dataclass(frozen=True, slots=True)
class RewardPenalties:
    """What is subtracted from the reward of a rollout that broke a rule, once for each rule.

    Attributes:
        invalid_tool_call: a turn wrote its tool call as text instead of making it.
        malformed_thinking: a turn's thinking tags do not match.
        truncated: the policy was cut off before it ended its answer.

    Raises:
        RewardError: a penalty that is negative or not finite.
    """

    invalid_tool_call: float = 0.0
    malformed_thinking: float = 0.0
    truncated: float = 0.0

    def __post_init__(self) -> None:
        for rule in ("invalid_tool_call", "malformed_thinking", "truncated"):
            if not 0 <= getattr(self, rule) < math.inf:
                raise RewardError(
                    f"the penalty {rule} must be a finite number >= 0, got {getattr(self, rule)}"
                )

    def __call__(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """``[N]`` float64: the sum of each rollout's penalties."""
        return torch.tensor(
            [
                self.invalid_tool_call * any(turn.invalid_tool_call for turn in t.turns)
                + self.malformed_thinking * any(turn.malformed_thinking for turn in t.turns)
                + self.truncated * t.stop_reason.truncated
                for t in trajectories
            ],
            dtype=torch.float64,
        )


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """What is done to rewards before advantages; nothing by default.

    Attributes:
        scaling: applied first.
        overlong: added next.
        stop_properly_coefficient: c in [0, 1]; the reward of truncated samples is multiplied by
            it. It takes the place of ``overlong``: giving both is refused.
        penalties: subtracted last.
    """

    scaling: LinearScaling | None = None
    overlong: OverlongPenalty | None = None
    stop_properly_coefficient: float | None = None
    penalties: RewardPenalties | None = None

    def __post_init__(self) -> None:
        coefficient = self.stop_properly_coefficient
        if coefficient is not None and not 0 <= coefficient <= 1:
            raise RewardError(f"stop_properly_coefficient must lie in [0, 1], got {coefficient}")
        if coefficient is not None and self.overlong is not None:
            raise RewardError("stop_properly_coefficient replaces the overlong penalty: give one of them")

    def __call__(self, rewards: torch.Tensor, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """Shaped rewards ``[N]`` from the rewards of N rollouts; NaN stays NaN."""
        shaped = self.scaling(rewards) if self.scaling else rewards
        if self.overlong is not None:
            longest = [max(len(turn.generation_token_ids) for turn in t.turns) for t in trajectories]
            lengths = torch.tensor(longest, dtype=torch.int64)
            shaped = shaped + self.overlong(lengths).to(shaped.dtype)
        if self.stop_properly_coefficient is not None:
            truncated = torch.tensor([t.stop_reason.truncated for t in trajectories], dtype=torch.bool)
            shaped = torch.where(truncated, shaped * self.stop_properly_coefficient, shaped)
        if self.penalties is not None:
            shaped = shaped - self.penalties(trajectories).to(shaped.dtype)
        return shaped
