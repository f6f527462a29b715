"""How an asynchronous run is bounded."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal

from .samplers import InOrder, Sampler

StragglerPolicy = Literal["wait", "replace", "shrink"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a rollout that failed is tried again, and after how long.

    Attributes:
        infra: tries after failures of the infrastructure.
        data: tries after failures that its row or its environment is to blame for.
        first_delay_s: before the first of them; it doubles with each.
        longest_delay_s: no delay is longer.
        jitter: in [0, 1]; a delay is shortened by up to this share.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    infra: int = 5
    data: int = 2
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        for name in ("infra", "data"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.first_delay_s <= self.longest_delay_s < math.inf:
            raise ValueError(
                f"first_delay_s must lie in [0, longest_delay_s = {self.longest_delay_s:g}], "
                f"got {self.first_delay_s:g}"
            )
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must lie in [0, 1], got {self.jitter:g}")

    def delay_s(self, failures: int, *key: int) -> float:
        """Seconds before the try that follows the ``failures``-th failure; the key decides the jitter."""
        doubled = min(self.first_delay_s * 2.0 ** min(failures - 1, 60), self.longest_delay_s)
        digest = hashlib.sha256(repr((failures, key)).encode()).digest()
        return doubled * (1 - self.jitter * int.from_bytes(digest[:4], "big") / 2**32)


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """What the controller goes by. Times in seconds.

    Attributes:
        steps: of the whole run, resumed parts included.
        prompts_per_step, group_size: rows per step, and rollouts of each.
        max_staleness: no group is trained more than so many steps after the oldest weights that sampled it;
            0 generates and trains in turns.
        sampler: which finished groups a step trains.
        max_running: groups that are played at once at most; ``None`` is bounded by staleness alone.
        retry: of rollouts that failed.
        straggler: what becomes of a group that is not finished ``straggler_timeout_s`` after its start:
            ``wait`` for it, ``replace`` it in its step by another and start its unfinished rollouts again, or
            ``shrink`` the step by its unfinished rollouts.
        straggler_timeout_s: see ``straggler``.
        min_batch_fraction: with ``shrink``: the least share of a step's rollouts that must have ended.
        max_replays: how often a row is replaced before its group is closed with what it has, and how often it
            may grow too old before training waits for it.
        rollout_timeout_s: the longest that one try of a rollout may take; then it has failed, and the
            infrastructure is to blame.
        stall_timeout_s: without any progress for so long the run is ended.
        evaluate_every, checkpoint_every: in steps; also before the first and after the last one; 0 only then.
        save_groups_every_s: how often finished groups are put on disk beside the last checkpoint; ``None``
            never.
        seed: of the jitter.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    steps: int
    prompts_per_step: int
    group_size: int
    max_staleness: int = 1
    sampler: Sampler = field(default_factory=InOrder)
    max_running: int | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    straggler: StragglerPolicy = "wait"
    straggler_timeout_s: float = 600.0
    min_batch_fraction: float = 0.5
    max_replays: int = 5
    rollout_timeout_s: float = 3600.0
    stall_timeout_s: float = 7200.0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    save_groups_every_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_staleness", "max_replays", "evaluate_every", "checkpoint_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("straggler_timeout_s", "rollout_timeout_s", "stall_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {getattr(self, name)}")
        if self.max_running is not None and self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, or None for no bound; got {self.max_running}")
        if not 0 < self.min_batch_fraction <= 1:
            raise ValueError(f"min_batch_fraction must lie in (0, 1], got {self.min_batch_fraction}")
        if self.save_groups_every_s is not None and not 0 < self.save_groups_every_s < math.inf:
            raise ValueError(
                f"save_groups_every_s must be a finite number > 0, or None; got {self.save_groups_every_s}"
            )
        if self.stall_timeout_s <= self.rollout_timeout_s:
            raise ValueError(
                f"stall_timeout_s {self.stall_timeout_s:g} must exceed rollout_timeout_s "
                f"{self.rollout_timeout_s:g}: a single rollout may take that long"
            )

    def evaluates(self, version: int) -> bool:
        """Whether the weights of ``version`` are measured."""
        return version in (0, self.steps) or (self.evaluate_every > 0 and version % self.evaluate_every == 0)

    @property
    def rows(self) -> int:
        """Rows of the whole run; no other is ever played, so it trains the same ones however it went."""
        return self.steps * self.prompts_per_step
