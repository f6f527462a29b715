"""What the single controller is configured by, beside what GRPO is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from .job import GRPOConfig
from .section import Count, NonNegative, Positive, Section


class Async(Section):
    """How far rollouts may run ahead of training, and what is done about the slow and the failed."""

    max_staleness: Count = 1
    """No group is trained more than so many steps after the oldest weights that sampled one of its tokens; 0
    generates and trains in turns."""
    sampler: str = "in_order"
    """Which finished groups a step trains: ``in_order`` of their rows, ``windowed`` (in order, but slow rows
    may be passed), ``ready_first`` (as they finish), ``weight_fifo`` (those of the oldest weights first), or
    ``module:Class`` of your own."""
    sampler_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a class of your own."""
    window_steps: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    """With ``windowed``: a step is taken from the rows of the next so many steps."""
    max_running_groups: PositiveInt | None = None
    """Groups that are played at once at most; none is bounded by ``max_staleness`` alone."""
    straggler_policy: Literal["wait", "replace", "shrink"] = "wait"
    """What becomes of a group that is not finished in time: ``wait`` for it, ``replace`` it in its step by
    another and start what is unfinished again, or ``shrink`` the step by what is unfinished."""
    straggler_timeout_s: Positive = 300.0
    """Seconds that a group has before ``straggler_policy`` is applied to it."""
    min_batch_fraction: Annotated[float, Field(gt=0, le=1)] = 0.75
    """With ``shrink``: the least share of a step's rollouts that must have ended."""
    max_row_replays: Count = 5
    """How often a row is replaced before its group is closed with what it has, and how often it may grow too
    old before training waits for it."""
    infra_retries: Count = 5
    """Tries of a rollout after failures of the infrastructure."""
    data_retries: Count = 2
    """Tries of a rollout after failures of its row or environment."""
    retry_delay_s: NonNegative = 1.0
    """Seconds before the first of them; doubles with each."""
    retry_delay_max_s: NonNegative = 30.0
    """No delay is longer."""
    gym_restarts: Count = 5
    """How often in a row a Gym that dies is started again."""
    rollout_timeout_s: Positive = 1800.0
    """Seconds that one try of a rollout may take; then the infrastructure has failed it."""
    stall_timeout_s: Positive = 3600.0
    """Seconds without any progress after which the run is ended."""
    save_groups_every_s: Positive | None = 30.0
    """Seconds between the writing of finished groups beside the last checkpoint; none leaves it."""
    grace_s: Positive = 30.0
    """Seconds from a SIGTERM or Ctrl-C to the end of the process. The step that is being trained is finished
    and saved if there is time for it."""

    @model_validator(mode="after")
    def _goes_together(self) -> Async:
        if self.sampler_options and ":" not in self.sampler:
            raise ValueError(
                f"sampler_options are of a class of your own, not of {self.sampler}; leave them out"
            )
        if self.stall_timeout_s <= self.rollout_timeout_s:
            raise ValueError(
                f"stall_timeout_s={self.stall_timeout_s:g} must exceed rollout_timeout_s="
                f"{self.rollout_timeout_s:g}: a single rollout may take that long"
            )
        if self.retry_delay_max_s < self.retry_delay_s:
            raise ValueError(
                f"retry_delay_max_s={self.retry_delay_max_s:g} is below "
                f"retry_delay_s={self.retry_delay_s:g}; raise it"
            )
        return self


class SingleControllerConfig(GRPOConfig):
    """One asynchronous run of GRPO or a relative of it."""

    command: ClassVar[str] = "single-controller"

    async_: Async = Field(default=Async(), alias="async")

    @model_validator(mode="after")
    def _no_rows_on_demand(self) -> SingleControllerConfig:
        if self.algorithm.dynamic_sampling:
            raise ValueError(
                "algorithm.dynamic_sampling plays further rows within a step, and here rows are played ahead "
                "of their steps; use algorithm.filter_zero_spread, or the command grpo"
            )
        return self
