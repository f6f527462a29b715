"""What a checkpoint holds of a controller, and how a resumed one goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..replay import Group, PositionSet


class SnapshotError(ValueError):
    """A snapshot that this version cannot read, or that belongs to another run."""


@dataclass(slots=True)
class Counters:
    """What went wrong and was made good, since the beginning of the run.

    Attributes:
        infra_retries, data_retries: rollouts that were tried again after a failure of that kind.
        timeouts: tries that took too long; each is a failure of the infrastructure.
        stale_rows: rows that are played again because what they had was too old to be trained.
        straggler_rows: rows that were replaced in their step because they took too long.
        stragglers: rollouts that were given up so that a step could go on.
        late: results of tries that were over already, and repeated ones; none of them counts.
        discarded_groups: finished groups that a resume could not use.
        overslept_s: seconds in which the process did not run; no deadline counts them.
    """

    infra_retries: int = 0
    data_retries: int = 0
    timeouts: int = 0
    stale_rows: int = 0
    straggler_rows: int = 0
    stragglers: int = 0
    late: int = 0
    discarded_groups: int = 0
    overslept_s: float = 0.0

    def to_json(self) -> dict[str, float]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


@dataclass(frozen=True, slots=True)
class RolloutHistory:
    """How often a rollout of an unfinished row was tried, and had failed."""

    tries: int
    infra: int
    data: int


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What is known of a row that was begun and is not finished."""

    position: int
    stale: int
    replaced: int
    rollouts: tuple[RolloutHistory, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The controller at a version.

    Attributes:
        version: trained steps.
        next_position: of the first row that was never begun.
        trained: positions of all groups that were trained.
        ready: finished groups that were not.
        histories: of rows that were begun and not finished; those without an entry have none.
        counters: see :class:`Counters`.
    """

    version: int = 0
    next_position: int = 0
    trained: PositionSet = field(default_factory=PositionSet)
    ready: tuple[Group, ...] = ()
    histories: tuple[RowHistory, ...] = ()
    counters: Counters = field(default_factory=Counters)

    def to_json(self) -> dict[str, Any]:
        """All but the finished groups, whose rollouts are not the controller's to write."""
        return {
            "version": self.version,
            "next_position": self.next_position,
            "trained": {"below": self.trained.below, "beyond": self.trained.beyond},
            "histories": [
                {
                    "position": row.position,
                    "stale": row.stale,
                    "replaced": row.replaced,
                    "rollouts": [[r.tries, r.infra, r.data] for r in row.rollouts],
                }
                for row in self.histories
            ],
            "counters": self.counters.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], ready: Sequence[Group] = ()) -> Snapshot:
        """What :meth:`to_json` wrote, and the groups that were written beside it.

        Raises:
            SnapshotError: it is not of that form.
        """
        try:
            return cls(
                version=int(content["version"]),
                next_position=int(content["next_position"]),
                trained=PositionSet(content["trained"]["below"], content["trained"]["beyond"]),
                ready=tuple(ready),
                histories=tuple(
                    RowHistory(
                        row["position"],
                        row["stale"],
                        row["replaced"],
                        tuple(RolloutHistory(*numbers) for numbers in row["rollouts"]),
                    )
                    for row in content["histories"]
                ),
                counters=Counters(**content["counters"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(
                f"the controller's state in the checkpoint cannot be read ({type(error).__name__}: {error}); "
                "resume with the version that wrote it"
            ) from error
