"""Settings of the synchronous GRPO loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..rewards import RewardShaping
from ..schedules import Decay, LearningRateSchedule

AdvantageKind = Literal["grpo", "rloo", "dr_grpo"]
ADVANTAGES: tuple[AdvantageKind, ...] = ("grpo", "rloo", "dr_grpo")


@dataclass(frozen=True, slots=True)
class GRPOSettings:
    """How the loop runs.

    Attributes:
        steps: steps of the whole run, resumed parts included.
        prompts_per_step, group_size: rows per step, and rollouts of each.
        learning_rate, warmup_steps, decay, learning_rate_floor: see
            :class:`rl_algorithms.schedules.LearningRateSchedule`; a descent ends at ``steps``.
        evaluate_every: also evaluated before the first and after the last step; 0 only then.
        checkpoint_every: also written before the first and after the last step and on a stop; 0 only then.
        advantage: ``grpo``, ``rloo`` or ``dr_grpo``.
        normalize, leave_one_out: of ``grpo`` advantages.
        updates_per_step: optimizer updates per step; each trains an equal part of the step's
            samples, drawn at random, as a whole batch of its own.
        shaping: of the rewards.
        shuffle_rewards: a diagnostic: permute the rewards over the whole batch. A policy that
            still improves learns from something other than its rewards.
        overlong_filtering: truncated samples stay in the baseline but are not trained.
        filter_zero_spread: drop groups whose unshaped rewards are all equal, counted. Off, they
            have advantage 0 (unless shaping tells them apart) and count in the denominators.
        success_reward: unshaped reward from which a sample counts as right in ``accuracy``.
        max_infra_failures: infrastructure failures tolerated in one step, after the retries of
            the rollout source; one more ends the run.
        max_data_failures_share: share of a step's rollouts, in [0, 1], that may fail as data (an
            environment that failed in mid-rollout included); a larger one ends the run.
        max_skipped_steps: steps in a row that may make no update, because no sample is usable or the
            rewards of every group are all equal; one more ends the run. Steps that are all right do not
            count.
        seed: of row order, mini-batches and shuffling.

    Raises:
        ValueError: a value outside its range, or a combination that cannot be meant; names it.
    """

    steps: int
    prompts_per_step: int
    group_size: int
    learning_rate: float
    warmup_steps: int = 0
    decay: Decay = "constant"
    learning_rate_floor: float = 0.0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    advantage: AdvantageKind = "grpo"
    normalize: bool = True
    leave_one_out: bool = False
    updates_per_step: int = 1
    shaping: RewardShaping = field(default_factory=RewardShaping)
    shuffle_rewards: bool = False
    overlong_filtering: bool = False
    filter_zero_spread: bool = False
    success_reward: float = 1.0
    max_infra_failures: int = 5
    max_data_failures_share: float = 0.5
    max_skipped_steps: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "group_size", "updates_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("evaluate_every", "checkpoint_every", "max_infra_failures", "max_skipped_steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.max_data_failures_share <= 1:
            raise ValueError(
                f"max_data_failures_share must lie in [0, 1], got {self.max_data_failures_share}"
            )
        if self.advantage not in ADVANTAGES:
            raise ValueError(
                f"advantage {self.advantage!r} is unknown; choose one of {', '.join(ADVANTAGES)}"
            )
        if self.leave_one_out and self.advantage != "grpo":
            raise ValueError(f"leave_one_out belongs to advantage 'grpo', not to {self.advantage!r}")
        self.schedule  # noqa: B018 - refuses a wrong learning rate here rather than at the first step

    @property
    def schedule(self) -> LearningRateSchedule:
        """The learning rate as a function of the step."""
        return LearningRateSchedule(
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay=self.decay,
            total_steps=self.steps,
            floor=self.learning_rate_floor,
        )
