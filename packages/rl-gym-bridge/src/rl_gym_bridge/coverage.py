"""Which rows gave samples and which never do, over any number of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .requests import RolloutRequest, RolloutResult
from .trajectory import FailureKind, RolloutFailure

_FIELDS = ("expected", "completed", "failed_infra", "failed_data")


@dataclass(slots=True)
class TaskCoverage:
    """The rollouts of one row.

    Attributes:
        agent: the agent that the row names.
        expected: how many were asked for.
        completed: how many became a trajectory.
        failed_infra: how many failed by machinery.
        failed_data: how many failed by the row, the environment or the answer.
    """

    agent: str
    expected: int = 0
    completed: int = 0
    failed_infra: int = 0
    failed_data: int = 0

    @property
    def missing(self) -> int:
        """Asked for and not completed, whether failed or never heard of again."""
        return self.expected - self.completed


class Coverage:
    """Counts per row, from the moment that it is asked for: one that always fails stays visible."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskCoverage] = {}

    def expect(self, requests: Iterable[RolloutRequest]) -> None:
        """Count requests."""
        for request in requests:
            self._task(request).expected += 1

    def add(self, result: RolloutResult) -> None:
        """Count a result of an expected request."""
        task = self._task(result.request)
        if not isinstance(result.outcome, RolloutFailure):
            task.completed += 1
        elif result.outcome.kind is FailureKind.INFRA:
            task.failed_infra += 1
        else:
            task.failed_data += 1

    def merge(self, other: Coverage) -> None:
        """Count everything that ``other`` has counted, such as that of another step."""
        for row_id, counted in other.tasks.items():
            task = self.tasks.setdefault(row_id, TaskCoverage(counted.agent))
            for name in _FIELDS:
                setattr(task, name, getattr(task, name) + getattr(counted, name))

    @property
    def never_completed(self) -> tuple[str, ...]:
        """Ids of the rows that were asked for and never gave a trajectory."""
        return tuple(row_id for row_id, task in self.tasks.items() if task.expected and not task.completed)

    def summary(self) -> dict[str, float]:
        """``<agent>/coverage/<measure>`` and ``all/coverage/<measure>``.

        Measures: ``tasks``, ``tasks_never_completed``, ``expected``, ``completed``, ``missing``.
        """
        scopes: dict[str, list[TaskCoverage]] = {"all": list(self.tasks.values())}
        for task in self.tasks.values():
            scopes.setdefault(task.agent, []).append(task)
        numbers: dict[str, float] = {}
        for scope, tasks in scopes.items():
            measures = {
                "tasks": len(tasks),
                "tasks_never_completed": sum(1 for t in tasks if t.expected and not t.completed),
                "expected": sum(t.expected for t in tasks),
                "completed": sum(t.completed for t in tasks),
                "missing": sum(t.missing for t in tasks),
            }
            numbers |= {f"{scope}/coverage/{name}": float(value) for name, value in measures.items()}
        return numbers

    def to_mapping(self) -> dict[str, dict[str, Any]]:
        """As JSON, for a checkpoint."""
        return {
            row_id: {"agent": task.agent, **{name: getattr(task, name) for name in _FIELDS}}
            for row_id, task in self.tasks.items()
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Mapping[str, Any]]) -> Coverage:
        """From what :meth:`to_mapping` made."""
        coverage = cls()
        coverage.tasks = {row_id: TaskCoverage(**fields) for row_id, fields in mapping.items()}
        return coverage

    def _task(self, request: RolloutRequest) -> TaskCoverage:
        return self.tasks.setdefault(request.row_id, TaskCoverage(request.agent))
