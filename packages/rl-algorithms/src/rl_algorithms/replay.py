"""The groups between rollouts and training: reserved while played, ready when finished, trained once.

A group is the rollouts of one row. Its identity is the row's *position* in the order of all draws of the run:
rows repeat, positions do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class ReplayError(RuntimeError):
    """A group that is reserved, committed, removed or trained out of turn."""


@dataclass(frozen=True, slots=True)
class Missing:
    """In the place of a rollout that has no outcome, not even its own failure."""

    index: int
    why: str


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one row, finished or failed.

    Attributes:
        position: of the row in the order of draws.
        outcomes: in the order of the group's rollouts; :class:`Missing` where one has none.
        oldest, newest: versions (trained steps) of the oldest and the newest weights that sampled a token.
        order: its place among those that wait to be trained, for samplers that go by order.
        serial: how many groups were finished before it.
        stragglers: rollouts that were given up because the others had waited long enough.
    """

    position: int
    outcomes: tuple[Any, ...]
    oldest: int
    newest: int
    order: int
    serial: int = 0
    stragglers: int = 0


class PositionSet:
    """A set of positions that soon holds all below a number: kept as that number and those beyond it."""

    def __init__(self, below: int = 0, beyond: Iterable[int] = ()) -> None:
        self.below = below
        self._beyond = {position for position in beyond if position >= below}
        self._settle()

    @property
    def beyond(self) -> list[int]:
        """Members that are not below :attr:`below`, rising."""
        return sorted(self._beyond)

    def copy(self) -> PositionSet:
        return PositionSet(self.below, self._beyond)

    def add(self, position: int) -> None:
        if position not in self:
            self._beyond.add(position)
            self._settle()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PositionSet):
            return NotImplemented
        return (self.below, self._beyond) == (other.below, other._beyond)

    # It changes.
    __hash__: ClassVar[None] = None

    def __contains__(self, position: int) -> bool:
        return 0 <= position < self.below or position in self._beyond

    def __len__(self) -> int:
        return self.below + len(self._beyond)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.below)
        yield from self.beyond

    def _settle(self) -> None:
        while self.below in self._beyond:
            self._beyond.remove(self.below)
            self.below += 1


class ReplayBuffer:
    """Which positions are reserved, ready and trained. Every position is in one state at a time.

    Args:
        trained: positions that were trained before.
    """

    def __init__(self, trained: PositionSet | None = None) -> None:
        self.trained = trained or PositionSet()
        self._reserved: set[int] = set()
        self._ready: dict[int, Group] = {}

    @property
    def running(self) -> int:
        """Reserved positions."""
        return len(self._reserved)

    @property
    def waiting(self) -> int:
        """Ready groups."""
        return len(self._ready)

    @property
    def accepted(self) -> int:
        """Groups that were ever committed and not removed: trained or ready."""
        return len(self.trained) + len(self._ready)

    @property
    def ready(self) -> list[Group]:
        """Committed groups that are not trained, in the order in which they were committed."""
        return list(self._ready.values())

    def __contains__(self, position: int) -> bool:
        """Whether the position is reserved, ready or trained."""
        return position in self._reserved or position in self._ready or position in self.trained

    def reserve(self, position: int) -> None:
        """Its row is about to be played.

        Raises:
            ReplayError: it is there already.
        """
        if position in self:
            raise ReplayError(f"position {position} is {self._state(position)}: it cannot be reserved")
        self._reserved.add(position)

    def commit(self, group: Group) -> None:
        """Its reserved row has been played.

        Raises:
            ReplayError: it is not reserved.
        """
        if group.position not in self._reserved:
            raise ReplayError(
                f"position {group.position} is {self._state(group.position)}: only a reserved one can be "
                "committed"
            )
        self._reserved.remove(group.position)
        self._ready[group.position] = group

    def remove(self, position: int) -> None:
        """It is given up, reserved or ready; its row may be reserved again.

        Raises:
            ReplayError: it is neither.
        """
        if position in self._reserved:
            self._reserved.remove(position)
        elif position in self._ready:
            del self._ready[position]
        else:
            raise ReplayError(f"position {position} is {self._state(position)}: there is nothing to remove")

    def take(self, positions: Sequence[int]) -> list[Group]:
        """The ready groups of these positions, in their order; they are trained from now on.

        Raises:
            ReplayError: one is not ready, or is named twice; nothing has changed then.
        """
        for index, position in enumerate(positions):
            if position not in self._ready or position in positions[:index]:
                state = "named twice" if position in positions[:index] else self._state(position)
                raise ReplayError(f"position {position} is {state}: only ready groups can be trained, once")
        groups = [self._ready.pop(position) for position in positions]
        for position in positions:
            self.trained.add(position)
        return groups

    def _state(self, position: int) -> str:
        if position in self._reserved:
            return "reserved"
        if position in self._ready:
            return "ready"
        return "trained" if position in self.trained else "not reserved"
