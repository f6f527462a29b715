"""What a trainer asks Gym for, and what comes back, one rollout at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .trajectory import RolloutFailure, Trajectory


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to run.

    Attributes:
        rollout_id: unique among all requests of a run; results are matched by it.
        group_id: the group that the rollout belongs to.
        row_id: the row that it is a rollout of.
        agent: the Gym agent that runs it.
        body: the JSON object that the agent gets: the row with the run's generation settings put in.
        effort: name of the effort level, empty where there is none.
    """

    rollout_id: str
    group_id: str
    row_id: str
    agent: str
    body: Mapping[str, Any]
    effort: str = ""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """How one rollout ended.

    Attributes:
        request: what was asked for.
        outcome: the sample, or why there is none.
        answer: Gym's answer as it came, ``None`` where there was none.
        attempts: how often the agent was asked.
        seconds: from admission to the end.
    """

    request: RolloutRequest
    outcome: Trajectory | RolloutFailure
    answer: Mapping[str, Any] | None = None
    attempts: int = 1
    seconds: float = 0.0


class RolloutRunner(Protocol):
    """Runs rollouts and hands each over when it is finished: a Gym of this process or one behind an actor."""

    def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        """Exactly one result per request, in the order in which they finish."""
        ...
