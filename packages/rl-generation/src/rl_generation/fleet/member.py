"""One replica of a fleet with its state, and calls to it that end when it is given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..failures import DeadlineError, EngineDeadError, InfraError
from .replica import Replica, ReplicaFacts
from .settings import RestartPolicy
from .states import LIVE, ReplicaEvent, ReplicaMachine, ReplicaState

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Member:
    """A replica, its machine, and what is known about it. Belongs to one event loop.

    Attributes:
        replica: the engine.
        machine: its state.
        url: of its server; ``None`` if it has none.
        facts: of its last start.
        tokens: sampled tokens that it has delivered.
        failed_probes: in a row.
        life: a number that changes when what was sent to it before does not count any more.
    """

    def __init__(self, replica: Replica, policy: RestartPolicy, clock: Callable[[], float]) -> None:
        self.replica = replica
        self.machine = ReplicaMachine(replica.name, policy, clock)
        self.url: str | None = None
        self.facts: ReplicaFacts | None = None
        self.tokens = 0
        self.failed_probes = 0
        self.life = 0
        self._relying: set[asyncio.Future[InfraError]] = set()

    @property
    def name(self) -> str:
        """Of the replica."""
        return self.replica.name

    @property
    def state(self) -> ReplicaState:
        """The state now."""
        return self.machine.state

    @property
    def live(self) -> bool:
        """Whether there ought to be a process that answers."""
        return self.state in LIVE

    async def call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Await a call to the replica, but no longer than the replica is relied on.

        Raises:
            DeadlineError: no answer within ``timeout_s``.
            InfraError: what :meth:`give_up` was called with.
            Exception: what the call raises.
        """
        given_up: asyncio.Future[InfraError] = asyncio.get_running_loop().create_future()
        self._relying.add(given_up)
        try:
            return await bounded(work, f"replica {self.name}: {what}", timeout_s, given_up)
        finally:
            self._relying.discard(given_up)
            given_up.cancel()

    def give_up(self, error: InfraError) -> None:
        """End all calls in flight with ``error``: nothing that comes from them counts."""
        self.life += 1
        for given_up in self._relying:
            if not given_up.done():
                given_up.set_result(error)

    def report(self, event: ReplicaEvent, cause: BaseException | None = None) -> bool:
        """Fire an event if it can happen in the present state; whether it could.

        Death and the end of the weights' validity end the calls in flight where they say more than the
        calls would.
        """
        if not self.machine.allows(event):
            return False
        before = self.state
        if event is ReplicaEvent.DIED:
            self.failed_probes = 0
            self.give_up(_dead(self.name, cause))
        after = self.machine.fire(event)
        if after is not before:
            bad = after in (ReplicaState.SUSPECT, ReplicaState.DEAD, ReplicaState.RETIRED) and cause
            logger.log(
                logging.WARNING if bad else logging.INFO,
                "replica %s: %s -> %s (%s)%s",
                *(self.name, before, after, event, f": {cause}" if cause else ""),
            )
        return True


async def bounded(
    work: Coroutine[Any, Any, T],
    what: str,
    timeout_s: float,
    given_up: asyncio.Future[InfraError] | None = None,
) -> T:
    """Await something for at most ``timeout_s``; unlike ``wait_for`` not even for its cancellation.

    Raises:
        DeadlineError: no result in time.
        InfraError: the result of ``given_up``, which ends the wait as well.
        Exception: what the work raises.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait(
            (task, given_up) if given_up is not None else (task,),
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if given_up is not None and given_up.done():
            raise given_up.result()
        if task.done():
            return task.result()
    finally:
        abandon(task)
    raise DeadlineError(f"{what} did not end within {timeout_s:.3g} s")


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and let nobody complain about how it ends."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _dead(name: str, cause: BaseException | None) -> EngineDeadError:
    if isinstance(cause, EngineDeadError):
        return cause
    error = EngineDeadError(f"replica {name}: given up" + (f": {cause}" if cause else ""))
    error.__cause__ = cause
    return error
