"""What may happen to a controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_gym_bridge.trajectory import FailureKind


@dataclass(frozen=True, slots=True)
class Begin:
    """Everything has started; the first event.

    Attributes:
        measured: whether the version that the run begins with has an evaluation already.
        saved: whether it has a checkpoint already.
    """

    measured: bool = False
    saved: bool = False


@dataclass(frozen=True, slots=True)
class RolloutEnded:
    """One try of a rollout is over.

    Attributes:
        position, index: which rollout.
        number: of the try, as it was started.
        outcome: the sample or the failure; a controller does not look into it.
        failure: of which kind it failed; ``None`` for a sample.
        oldest, newest: versions (trained steps) of the weights that sampled its tokens; ``None`` where
            nobody knows, and then those at its start count.
    """

    position: int
    index: int
    number: int
    outcome: Any
    failure: FailureKind | None = None
    oldest: int | None = None
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """The step that was asked for is trained: ``version`` steps are done."""

    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """The engine samples from the weights of ``version`` steps; every later token is."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation that was asked for; ``reached`` if it is good enough to end the run."""

    version: int
    reached: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint that was asked for is on disk."""

    version: int


@dataclass(frozen=True, slots=True)
class GroupsSaved:
    """The finished groups that were asked for are on disk."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the run to end, in order to be resumed later."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time has come that :meth:`~rl_algorithms.controller.machine.Controller.next_timer` named."""


Event = Begin | RolloutEnded | Trained | Published | Evaluated | Saved | GroupsSaved | StopRequested | Tick
