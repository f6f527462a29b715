"""One row that is being played: its rollouts, their tries and what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_gym_bridge.trajectory import FailureKind

from ..replay import Group, Missing
from .commands import Try
from .settings import RetryPolicy
from .snapshot import RolloutHistory, RowHistory


@dataclass(slots=True)
class _Rollout:
    tries: int = 0
    infra: int = 0
    data: int = 0
    # The version that the engine had when the running try began; None while none runs.
    since: int | None = None
    began: float = 0.0
    done: bool = False
    outcome: Any = None
    oldest: int | None = None
    newest: int | None = None


class Play:
    """A row between its reservation and its group.

    Attributes:
        position: of the row.
        order: its place among those that wait to be trained.
        stale, replaced: how often it was played in vain, because it grew too old or took too long.
        overdue: whether it has had all the time that it may take.
    """

    def __init__(self, position: int, group_size: int, order: int) -> None:
        self.position = position
        self.order = order
        self.stale = 0
        self.replaced = 0
        self.overdue = False
        self._rollouts = [_Rollout() for _ in range(group_size)]

    @classmethod
    def of(cls, history: RowHistory, group_size: int) -> Play:
        """A row that was begun before; nothing of it is finished."""
        play = cls(history.position, group_size, history.position)
        play.stale, play.replaced = history.stale, history.replaced
        for rollout, known in zip(play._rollouts, history.rollouts, strict=False):
            rollout.tries, rollout.infra, rollout.data = known.tries, known.infra, known.data
        return play

    @property
    def history(self) -> RowHistory:
        rollouts = tuple(RolloutHistory(r.tries, r.infra, r.data) for r in self._rollouts)
        return RowHistory(self.position, self.stale, self.replaced, rollouts)

    @property
    def replays(self) -> int:
        """How often it was begun again."""
        return self.stale + self.replaced

    @property
    def finished(self) -> bool:
        return all(rollout.done for rollout in self._rollouts)

    @property
    def ended(self) -> int:
        """Rollouts that have an outcome."""
        return sum(rollout.done for rollout in self._rollouts)

    def oldest(self, served: int) -> int:
        """The oldest version of any token that it has or may still get."""
        known = [r.oldest for r in self._rollouts if r.done and r.oldest is not None]
        running = [served if r.since is None else r.since for r in self._rollouts if not r.done]
        return min([*known, *running], default=served)

    def start_all(self, version: int, now: float) -> tuple[Try, ...]:
        """A try of every rollout that is not done; none of them runs."""
        return tuple(self.start(index, version, now) for index, r in enumerate(self._rollouts) if not r.done)

    def start(self, index: int, version: int, now: float) -> Try:
        rollout = self._rollouts[index]
        number = rollout.tries
        rollout.tries += 1
        rollout.since, rollout.began = version, now
        return Try(index, number)

    def longest_running(self) -> tuple[Try, float] | None:
        """The running try that began first, and when that was."""
        running = [
            (rollout.began, index)
            for index, rollout in enumerate(self._rollouts)
            if rollout.since is not None
        ]
        if not running:
            return None
        began, index = min(running)
        return Try(index, self._rollouts[index].tries - 1), began

    def stop_running(self) -> tuple[Try, ...]:
        """Give the running tries up; which they were."""
        running = tuple(self._running())
        for one in running:
            self._rollouts[one.index].since = None
        return running

    def forget(self) -> tuple[Try, ...]:
        """Give everything up that it has; which tries ran."""
        running = self.stop_running()
        for rollout in self._rollouts:
            rollout.done, rollout.outcome, rollout.oldest, rollout.newest = False, None, None, None
        self.overdue = False
        return running

    def runs(self, index: int, number: int) -> bool:
        """Whether this try is the one that is waited for."""
        if not 0 <= index < len(self._rollouts):
            return False
        rollout = self._rollouts[index]
        return not rollout.done and rollout.since is not None and rollout.tries - 1 == number

    def waits_for_retry(self, index: int, number: int) -> bool:
        """Whether try ``number`` is the next, and has not begun."""
        rollout = self._rollouts[index]
        return not rollout.done and rollout.since is None and rollout.tries == number

    def succeed(self, index: int, outcome: Any, oldest: int | None, newest: int | None, served: int) -> None:
        """The running try of a rollout gave a sample."""
        rollout = self._rollouts[index]
        since = served if rollout.since is None else rollout.since
        rollout.done, rollout.outcome, rollout.since = True, outcome, None
        rollout.oldest = since if oldest is None else oldest
        rollout.newest = served if newest is None else newest

    def fail(self, index: int, outcome: Any, kind: FailureKind, retry: RetryPolicy) -> int | None:
        """The running try of a rollout failed.

        Returns:
            How often it has failed with this kind, if it may be tried again; ``None`` if ``outcome`` is
            final.
        """
        rollout = self._rollouts[index]
        rollout.since = None
        if kind is FailureKind.INFRA:
            rollout.infra += 1
            count, budget = rollout.infra, retry.infra
        else:
            rollout.data += 1
            count, budget = rollout.data, retry.data
        if count <= budget:
            return count
        rollout.done, rollout.outcome = True, outcome
        return None

    def next_number(self, index: int) -> int:
        """Of the next try of a rollout."""
        return self._rollouts[index].tries

    def group(self, serial: int, served: int) -> Group:
        """What it has; rollouts that are not done are missing."""
        oldest = [r.oldest for r in self._rollouts if r.oldest is not None]
        newest = [r.newest for r in self._rollouts if r.newest is not None]
        missing = sum(not rollout.done for rollout in self._rollouts)
        return Group(
            self.position,
            tuple(
                r.outcome if r.done else Missing(index, "its group had waited long enough for it")
                for index, r in enumerate(self._rollouts)
            ),
            oldest=min(oldest, default=served),
            newest=max(newest, default=served),
            order=self.order,
            serial=serial,
            stragglers=missing,
        )

    def _running(self) -> Iterator[Try]:
        for index, rollout in enumerate(self._rollouts):
            if rollout.since is not None:
                yield Try(index, rollout.tries - 1)
