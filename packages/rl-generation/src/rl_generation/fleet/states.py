"""The states of a replica and what may lead from one to another. Pure: no waits, no calls, a given clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from enum import StrEnum

from ..failures import GenerationError
from .settings import RestartPolicy


class ReplicaState(StrEnum):
    """Where a replica stands; only a ``HEALTHY`` one is given requests."""

    HEALTHY = "healthy"
    #: A call or a probe failed; a probe decides.
    SUSPECT = "suspect"
    #: Its process is gone or does nothing.
    DEAD = "dead"
    #: It is being started, for the first time or again.
    RESTARTING = "restarting"
    #: It runs and holds old or partly written weights.
    STALE = "stale"
    #: It is not started again.
    RETIRED = "retired"


class ReplicaEvent(StrEnum):
    """What happened to a replica."""

    #: It started, and the fleet has moved on from the weights that it loaded.
    STARTED = "started"
    #: It started with the very weights that the fleet serves, because no refit ever changed them.
    STARTED_CURRENT = "started with the fleet's weights"
    #: A call or a probe failed, and the replica may live.
    FAILED = "failed"
    #: A probe of a suspect one succeeded.
    RECOVERED = "recovered"
    DIED = "died"
    #: Its weights are not the fleet's any more, or not whole.
    OUTDATED = "outdated"
    #: A refit completed and was acknowledged.
    REFITTED = "refitted"
    RESTART = "restart"
    RETIRE = "retire"


_S, _E = ReplicaState, ReplicaEvent

TRANSITIONS: Mapping[ReplicaState, Mapping[ReplicaEvent, ReplicaState]] = {
    _S.RESTARTING: {
        _E.STARTED: _S.STALE,
        _E.STARTED_CURRENT: _S.HEALTHY,
        _E.DIED: _S.DEAD,
        _E.RETIRE: _S.RETIRED,
    },
    _S.HEALTHY: {
        _E.FAILED: _S.SUSPECT,
        _E.OUTDATED: _S.STALE,
        _E.DIED: _S.DEAD,
        _E.RETIRE: _S.RETIRED,
    },
    _S.SUSPECT: {
        _E.FAILED: _S.SUSPECT,
        _E.RECOVERED: _S.HEALTHY,
        _E.OUTDATED: _S.STALE,
        _E.DIED: _S.DEAD,
        _E.RETIRE: _S.RETIRED,
    },
    _S.STALE: {
        _E.FAILED: _S.STALE,
        _E.OUTDATED: _S.STALE,
        _E.REFITTED: _S.HEALTHY,
        _E.DIED: _S.DEAD,
        _E.RETIRE: _S.RETIRED,
    },
    _S.DEAD: {_E.RESTART: _S.RESTARTING, _E.RETIRE: _S.RETIRED},
    _S.RETIRED: {},
}
"""All transitions that exist. ``HEALTHY`` is reached from ``STALE`` by a completed refit alone."""

LIVE = frozenset({_S.HEALTHY, _S.SUSPECT, _S.STALE})
"""States in which a process is there and answers, or ought to."""


class TransitionError(GenerationError):
    """An event that cannot happen to a replica in its state; says what can."""


class ReplicaMachine:
    """State, failures and restarts of one replica.

    Args:
        name: of the replica.
        policy: of its restarts.
        clock: seconds, never going back.
        draw: numbers in [0, 1) for the jitter; by default from a generator seeded by the name.
    """

    def __init__(
        self,
        name: str,
        policy: RestartPolicy,
        clock: Callable[[], float],
        draw: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self._policy = policy
        self._clock = clock
        self._draw = draw or random.Random(name).random
        self._listeners: list[Callable[[ReplicaState, ReplicaState], None]] = []
        self._state = ReplicaState.RESTARTING
        self._since = clock()
        self._healthy_s = 0.0
        self._restarts = 0
        self._failures = 0
        self._incidents = 0
        self._restart_at: float | None = None

    @property
    def state(self) -> ReplicaState:
        """The state now."""
        return self._state

    @property
    def since(self) -> float:
        """The clock when it came into this state."""
        return self._since

    @property
    def failures(self) -> int:
        """Incidents since the last answer to a request, the last start or the last refit."""
        return self._failures

    @property
    def incidents(self) -> int:
        """How often a failure made it suspect; what fails before a probe has decided belongs to the same."""
        return self._incidents

    @property
    def restarts(self) -> int:
        """Restarts in a row."""
        return self._restarts

    @property
    def exhausted(self) -> bool:
        """Whether no restart is left."""
        return self._restarts >= self._policy.max_restarts

    @property
    def seconds_to_restart(self) -> float:
        """How long a dead replica still has to wait."""
        return max(0.0, (self._restart_at or 0.0) - self._clock())

    def listen(self, listener: Callable[[ReplicaState, ReplicaState], None]) -> None:
        """Call ``listener(old, new)`` after every change of state."""
        self._listeners.append(listener)

    def allows(self, event: ReplicaEvent) -> bool:
        """Whether :meth:`fire` would accept the event."""
        return not self._objection(event)

    def fire(self, event: ReplicaEvent) -> ReplicaState:
        """Take note of an event; the state after it.

        Raises:
            TransitionError: it cannot happen in this state, comes before the restart's delay has passed, or
                after the last restart. Nothing has changed then.
        """
        objection = self._objection(event)
        if objection:
            raise TransitionError(f"replica {self.name}: {objection}")
        old, new = self._state, TRANSITIONS[self._state][event]
        now = self._clock()
        if event is ReplicaEvent.FAILED and new is not old:
            self._failures += 1
            self._incidents += 1
        elif event in (ReplicaEvent.STARTED, ReplicaEvent.STARTED_CURRENT, ReplicaEvent.REFITTED):
            self._failures = 0
        elif event is ReplicaEvent.RESTART:
            self._restarts += 1
            self._healthy_s = 0.0
        if old is ReplicaState.HEALTHY:
            self._healthy_s += now - self._since
        if event is ReplicaEvent.DIED:
            if self._healthy_s >= self._policy.forgive_after_s:
                self._restarts = 0
            self._restart_at = now + self._policy.delay_s(self._restarts, self._draw())
        self._state, self._since = new, now
        if new is not old:
            for listener in list(self._listeners):
                listener(old, new)
        return new

    def answered(self) -> None:
        """Take note of an answer to a request: the failures before it count no more."""
        self._failures = 0

    def _objection(self, event: ReplicaEvent) -> str:
        possible = TRANSITIONS[self._state]
        if event not in possible:
            known = ", ".join(possible) or "nothing"
            return f"'{event}' cannot happen while it is {self._state} (possible: {known})"
        if event is ReplicaEvent.RESTART:
            if self.exhausted:
                return f"all {self._policy.max_restarts} restarts are used; it can only retire"
            if self.seconds_to_restart > 0:
                return f"it is too early to restart it, by {self.seconds_to_restart:.3g} s"
        return ""
