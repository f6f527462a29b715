"""Results sorted into their groups, and every way in which they can fail to add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .dataset import GymRow
from .failures import RolloutCountError
from .requests import RolloutRequest, RolloutResult
from .trajectory import RolloutFailure, Trajectory

_NAMED = 8


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one row in one step.

    Attributes:
        group_id: its identity.
        position: of the row among those of the step.
        row: the task.
        results: in rollout order; a failed rollout is in its place.
    """

    group_id: str
    position: int
    row: GymRow
    results: tuple[RolloutResult, ...]

    @property
    def outcomes(self) -> tuple[Trajectory | RolloutFailure, ...]:
        """What each rollout came to."""
        return tuple(result.outcome for result in self.results)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The samples."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Trajectory))

    @property
    def failures(self) -> tuple[RolloutFailure, ...]:
        """The rollouts that are no sample."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, RolloutFailure))


class GroupCollector:
    """Takes results one by one and gives a group back when it is complete.

    Args:
        rows: the tasks.
        groups: the requests of each of them.
    """

    def __init__(self, rows: Sequence[GymRow], groups: Sequence[Sequence[RolloutRequest]]) -> None:
        self._rows = tuple(rows)
        self._positions = {group[0].group_id: position for position, group in enumerate(groups)}
        self._groups = {group[0].group_id: tuple(group) for group in groups}
        self._requests = {request.rollout_id: request for group in groups for request in group}
        self._results: dict[str, RolloutResult] = {}
        if len(self._requests) != sum(len(group) for group in groups):
            raise RolloutCountError("two requests have one rollout id")

    @property
    def expected(self) -> int:
        """How many results there must be."""
        return len(self._requests)

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of the rollouts without a result, in the order of their requests."""
        return tuple(name for name in self._requests if name not in self._results)

    @property
    def complete(self) -> bool:
        """Whether every rollout has its result."""
        return len(self._results) == len(self._requests)

    def add(self, result: Any) -> RolloutGroup | None:
        """Take one result; the group that it completes, or ``None``.

        Raises:
            RolloutCountError: it is no result, nobody asked for it, it came before, or it mixes rollouts up.
        """
        if not isinstance(result, RolloutResult):
            raise RolloutCountError(f"the runner gave a {type(result).__name__} instead of a result")
        name = result.request.rollout_id
        asked = self._requests.get(name)
        if asked is None:
            raise RolloutCountError(f"there is a result for {name!r}, which was not asked for")
        if name in self._results:
            raise RolloutCountError(f"there are two results for {name!r}")
        _check_identity(result, asked)
        # The runner's copy of the request may have come through another process; one copy is enough.
        self._results[name] = replace(result, request=asked)
        group = self._groups[asked.group_id]
        results = [self._results.get(request.rollout_id) for request in group]
        done = tuple(found for found in results if found is not None)
        if len(done) < len(group):
            return None
        position = self._positions[asked.group_id]
        return RolloutGroup(asked.group_id, position, self._rows[position], done)

    def check_complete(self) -> None:
        """See that every rollout has its result.

        Raises:
            RolloutCountError: saying how many came and which are missing.
        """
        if not self.complete:
            raise RolloutCountError(
                f"the runner ended after {self.progress()}",
                missing=self.missing,
                remedy="it must give exactly one result per request, a failure record for what failed",
            )

    def progress(self) -> str:
        """``5 of 8 rollouts; missing: …`` for people."""
        missing = self.missing
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return (
            f"{len(self._results)} of {self.expected} rollouts; missing: {', '.join(missing[:_NAMED])}{more}"
        )


def _check_identity(result: RolloutResult, asked: RolloutRequest) -> None:
    outcome = result.outcome
    if not isinstance(outcome, (Trajectory, RolloutFailure)):
        raise RolloutCountError(
            f"the result of {asked.rollout_id!r} holds a {type(outcome).__name__}, neither a sample nor "
            "a failure"
        )
    pairs = {
        "group": (asked.group_id, result.request.group_id, outcome.group_id),
        "agent": (asked.agent, result.request.agent, outcome.agent),
        "row": (asked.row_id, result.request.row_id, asked.row_id),
        "rollout": (asked.rollout_id, result.request.rollout_id, outcome.rollout_id),
    }
    for what, (wanted, *found) in pairs.items():
        wrong = [name for name in found if name != wanted]
        if wrong:
            raise RolloutCountError(
                f"the result of {asked.rollout_id!r} is mixed up: its {what} is {wrong[0]!r} instead of "
                f"{wanted!r}"
            )
