"""What a loop remembers, reports and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_gym_bridge.trajectory import RolloutFailure, Trajectory


class LoopError(RuntimeError):
    """A loop that cannot go on; names the step, what was found and the remedy."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What an evaluation after ``step`` updates found (0 is before training)."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step, for whoever watches.

    ``advantages`` is ``[N]`` float64 (a mean over a rollout's tokens where they differ) and ``trained``
    ``[N]`` bool, both in the order of the N ``trajectories``.
    """

    step: int
    metrics: Mapping[str, float]
    trajectories: Sequence[Trajectory]
    failures: Sequence[RolloutFailure]
    advantages: torch.Tensor
    trained: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The whole run, earlier parts of a resumed one included.

    Attributes:
        steps_done: steps completed.
        stopped: whether a stop was requested before the last step.
        reached: whether an evaluation reached ``stop_at``, which ends a run early.
        held_out: every evaluation, oldest first; of a run that was not stopped, one of ``steps_done``.
        tokens: tokens that the policy sampled for training.
        seconds_generation, seconds_training, seconds_evaluation: wall-clock time of the parts.
        skipped_steps: steps that made no update: no sample was usable, or none better than another
            and not all right.
        failures: failed rollouts by kind.
    """

    steps_done: int
    stopped: bool
    reached: bool
    held_out: tuple[HeldOut, ...]
    tokens: int
    seconds_generation: float
    seconds_training: float
    seconds_evaluation: float
    skipped_steps: int
    failures: Mapping[str, int]


@dataclass(slots=True)
class LoopState:
    """Everything a resumed run needs besides the policy's own state; written into each checkpoint."""

    step: int = 0
    rows_drawn: int = 0
    held_out: list[HeldOut] = field(default_factory=list)
    tokens: int = 0
    seconds_generation: float = 0.0
    seconds_training: float = 0.0
    seconds_evaluation: float = 0.0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` restores exactly."""
        content: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        content["held_out"] = [{"step": entry.step, "metrics": entry.metrics} for entry in self.held_out]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LoopState:
        """The state that :meth:`to_json` wrote.

        Raises:
            LoopError: entries that are missing or not known.
        """
        odd = sorted(content.keys() ^ set(cls.__slots__))
        if odd:
            raise LoopError(
                f"the checkpoint's loop state and this version differ in {', '.join(odd)}: resume with the "
                "version that wrote it"
            )
        values: dict[str, Any] = dict(content)
        values["held_out"] = [HeldOut(entry["step"], dict(entry["metrics"])) for entry in content["held_out"]]
        values["failures"] = dict(content["failures"])
        return cls(**values)

    def result(self, *, stopped: bool, reached: bool = False) -> LoopResult:
        return LoopResult(
            steps_done=self.step,
            stopped=stopped,
            reached=reached,
            held_out=tuple(self.held_out),
            tokens=self.tokens,
            seconds_generation=self.seconds_generation,
            seconds_training=self.seconds_training,
            seconds_evaluation=self.seconds_evaluation,
            skipped_steps=self.skipped_steps,
            failures=dict(self.failures),
        )
