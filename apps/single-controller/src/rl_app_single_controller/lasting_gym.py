"""A Gym that is started anew when it dies."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from rl_gym_bridge.failures import GymError
from rl_gym_bridge.requests import RolloutRequest, RolloutResult, RolloutRunner
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure

logger = logging.getLogger(__name__)

# A Gym that has lived for so long has all its restarts again.
_FORGIVEN_AFTER_S = 600.0


class OneGym(RolloutRunner, Protocol):
    """A Gym that lives once."""

    def health_check(self) -> Any:
        """Raises a :class:`~rl_gym_bridge.failures.GymError` if it is no more."""
        ...

    def shutdown(self) -> None: ...


class GymLost(GymError):
    """Gym died, and could not be started again within ``async.gym_restarts``."""


class LastingGym:
    """A :class:`~rl_gym_bridge.requests.RolloutRunner` that outlives the Gyms that it runs on.

    Rollouts in a Gym that dies fail for want of infrastructure, so whoever retries them gets them from the
    next one; until that has started, they fail again. Usable from several event loops and threads.

    Args:
        first: a Gym that runs; its owner ends it.
        start: another one; this object ends it.
        restarts: in a row.
        say: told in a line what happens.
    """

    def __init__(
        self,
        first: OneGym,
        start: Callable[[], OneGym],
        *,
        restarts: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._gym = first
        self._start = start
        self._restarts = restarts
        self._say = say
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._in_a_row = 0
        self._made: list[OneGym] = []
        self._lost: GymLost | None = None
        self.restarted = 0

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        """See :class:`~rl_gym_bridge.requests.RolloutRunner`.

        Raises:
            GymLost: there is no Gym any more.
            GymError: of the Gym of now.
        """
        if self._lost is not None:
            raise self._lost
        gym = self._gym
        failed = False
        try:
            async for result in gym.run_rollouts(requests):
                failed |= _is_infra(result)
                yield result
        except GymError:
            await asyncio.to_thread(self.look_after, gym)
            raise
        if failed:
            await asyncio.to_thread(self.look_after, gym)

    def look_after(self, gym: OneGym | None = None) -> None:
        """Start another Gym if this one, by default that of now, is no more. One at a time does it.

        Raises:
            GymLost: it cannot be done.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if gym is not None and gym is not self._gym:
                # Somebody has done it meanwhile.
                return
            try:
                self._gym.health_check()
            except GymError as error:
                self._replace(error)

    def close(self) -> None:
        """End the Gyms that were started here; idempotent.

        Raises:
            GymError: the first that did not end.
        """
        problems: list[GymError] = []
        while self._made:
            try:
                self._made.pop().shutdown()
            except GymError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    def _replace(self, why: GymError) -> None:
        if time.monotonic() - self._since > _FORGIVEN_AFTER_S:
            self._in_a_row = 0
        while True:
            if self._in_a_row >= self._restarts:
                self._lost = GymLost(
                    f"it died and was started {self._in_a_row} times in a row: {why}",
                    component="gym",
                    remedy="look into the gym folders of the run's logs, and resume",
                )
                raise self._lost from why
            self._in_a_row += 1
            self._say(f"gym        has died and is started again ({' '.join(str(why).split())})")
            self._let_go()
            try:
                self._gym = self._start()
            except GymError as error:
                why = error
                continue
            self._made.append(self._gym)
            self._since = time.monotonic()
            self.restarted += 1
            return

    def _let_go(self) -> None:
        """What is left of the last one must not keep addresses or memory."""
        try:
            self._gym.shutdown()
        except GymError as error:
            logger.warning("a Gym that died did not end properly: %s", error)
        if self._gym in self._made:
            self._made.remove(self._gym)


def _is_infra(result: RolloutResult) -> bool:
    outcome = result.outcome
    return isinstance(outcome, RolloutFailure) and outcome.kind is FailureKind.INFRA
