"""Settings of the synchronous loop, whatever the method."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..rewards import RewardShaping
from ..schedules import Decay, LearningRateSchedule


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How the loop runs. What it learns by is a :class:`rl_algorithms.method.Method`.

    Attributes:
        steps: steps of the whole run, resumed parts included.
        prompts_per_step, group_size: rows per step, and rollouts of each.
        learning_rate, warmup_steps, decay, learning_rate_floor: see
            :class:`rl_algorithms.schedules.LearningRateSchedule`; a descent ends at ``steps``.
        evaluate_every: also evaluated before the first and after the last step; 0 only then.
        checkpoint_every: also written before the first and after the last step and on a stop; 0 only then.
        updates_per_step: optimizer updates per step; each trains an equal part of the step's
            samples, drawn at random, as a whole batch of its own.
        shaping: of the rewards.
        shuffle_rewards: a diagnostic: permute the rewards over the whole batch. A policy that
            still improves learns from something other than its rewards.
        overlong_filtering: truncated samples stay in the baseline but are not trained.
        dynamic_sampling: replace groups whose unshaped rewards are all equal by groups of further rows, until
            ``prompts_per_step`` groups can be told apart.
        max_generation_rounds: how often a step may generate for that; one more ends the run.
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
        max_epochs: passes over the rows after which the run ends, if ``steps`` are not done before; ``None``
            is no bound.
        stop_at: end the run once an evaluation's ``stop_metric`` is at least this; ``None`` never does.
        stop_metric: which of the evaluation's numbers ``stop_at`` and the best checkpoints go by.
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
    updates_per_step: int = 1
    shaping: RewardShaping = field(default_factory=RewardShaping)
    shuffle_rewards: bool = False
    overlong_filtering: bool = False
    filter_zero_spread: bool = False
    dynamic_sampling: bool = False
    max_generation_rounds: int = 10
    success_reward: float = 1.0
    max_infra_failures: int = 5
    max_data_failures_share: float = 0.5
    max_skipped_steps: int = 2
    max_epochs: int | None = None
    stop_at: float | None = None
    stop_metric: str = "accuracy"
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
        if self.max_epochs is not None and self.max_epochs < 1:
            raise ValueError(f"max_epochs must be at least 1, or None for no bound; got {self.max_epochs}")
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                "dynamic_sampling looks for groups whose rewards differ, and group_size 1 has none: raise it"
            )
        if self.max_generation_rounds < 1:
            raise ValueError(f"max_generation_rounds must be at least 1, got {self.max_generation_rounds}")
        if self.stop_at is not None and self.stop_at != self.stop_at:
            raise ValueError("stop_at must be a number")
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
