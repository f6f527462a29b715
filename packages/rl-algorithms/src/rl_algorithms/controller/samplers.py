"""Which of the finished groups the next step trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..replay import Group


class Sampler(Protocol):
    """Chooses groups for a step. It is asked again whenever something has changed."""

    def choose(self, ready: Sequence[Group], running: Sequence[int], count: int) -> Sequence[int] | None:
        """Positions of exactly ``count`` groups of ``ready``, or ``None`` to wait.

        Args:
            ready: finished groups that are young enough, in the order in which they were finished.
            running: the ``order`` of every group that is begun, or still to be begun, and not finished;
                rising.
            count: groups of a step.
        """
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """In the order of the draws: a step waits for the slowest of its own rows."""

    def choose(self, ready: Sequence[Group], running: Sequence[int], count: int) -> Sequence[int] | None:
        """See :class:`Sampler`."""
        return Windowed(count).choose(ready, running, count)


@dataclass(frozen=True, slots=True)
class Windowed:
    """In the order of the draws, among the first ``window`` that are not trained.

    A slow row may be passed by up to ``window − count`` others, and then training waits for it.

    Attributes:
        window: in groups; less than those of a step means exactly those of a step.
    """

    window: int

    def choose(self, ready: Sequence[Group], running: Sequence[int], count: int) -> Sequence[int] | None:
        """See :class:`Sampler`."""
        ordered = sorted(ready, key=lambda group: group.order)
        # So many of the first `window` places may be taken by groups that are not finished.
        chosen = ordered[:count]
        if len(chosen) < count:
            return None
        last = chosen[-1].order
        passed = sum(1 for order in running if order < last)
        return [group.position for group in chosen] if passed + count <= max(self.window, count) else None


@dataclass(frozen=True, slots=True)
class ReadyFirst:
    """Those that were finished first: never waits for a slow row, which may grow too old instead."""

    def choose(self, ready: Sequence[Group], running: Sequence[int], count: int) -> Sequence[int] | None:
        """See :class:`Sampler`."""
        return [group.position for group in ready[:count]] if len(ready) >= count else None


@dataclass(frozen=True, slots=True)
class WeightFifo:
    """Those of the oldest weights first, so that the fewest grow too old."""

    def choose(self, ready: Sequence[Group], running: Sequence[int], count: int) -> Sequence[int] | None:
        """See :class:`Sampler`."""
        ordered = sorted(ready, key=lambda group: (group.oldest, group.serial))
        return [group.position for group in ordered[:count]] if len(ordered) >= count else None
