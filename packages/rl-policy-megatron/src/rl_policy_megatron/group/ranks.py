"""The driver's hold on the ranks: started together, asked all at once, ended together, no process left."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from ..errors import RankError
from .answers import Answers, answers_of, drain
from .processes import ProcessPlace, end_all
from .rank import PolicyRank
from .reports import Standing
from .settings import GroupSettings, RankSettings

# How long a rank has to end in good order, and then Ray to end it: either is a matter of milliseconds unless
# the rank hangs.
_ORDERLY_S = 2.0
_LOOK_EVERY_S = 0.02
_DRAIN_S = 2.0


class Ranks:
    """All ranks of one group, each in a Ray actor. Its calls may come from several threads.

    Args:
        rank_class: of the actors.
        ranks: what they are built from.
        settings: resources and deadlines.

    Raises:
        rl_actor_envs.errors.ActorEnvironmentError: the environment of the ranks is not built.
    """

    def __init__(self, rank_class: type[PolicyRank], ranks: RankSettings, settings: GroupSettings) -> None:
        self._settings = settings
        self.world = ranks.world
        self._collective_timeout_s = ranks.collective_timeout_s
        self._lock = threading.Lock()
        self._number = 0
        self._ended_by = ""
        self._places: list[ProcessPlace | None] = [None] * ranks.world
        self._actors: list[Any] = []
        # Answers that nobody has taken yet.
        self._unread: set[Any] = set()
        self._settling: list[Any] = []
        actor = _actor_class(rank_class, ranks, settings)
        try:
            for rank in range(ranks.world):
                self._actors.append(actor.remote(ranks, rank))
            self._settling = [each.settle.remote() for each in self._actors]
            meeting = self._actors[0].host.remote(*self._settling) if ranks.world > 1 else None
            self._starting = [each.start.remote(meeting) for each in self._actors]
            self._unread.update(self._settling, self._starting, () if meeting is None else (meeting,))
        except BaseException:
            self.end("a failed start")
            raise

    @property
    def running(self) -> bool:
        """Whether they may be asked."""
        return bool(self._actors)

    @property
    def pids(self) -> list[int]:
        """Process numbers by rank, on their own machines; empty before they have started."""
        return [place.pid for place in self._places if place is not None]

    def wait_until_started(self) -> list[Any]:
        """What each rank says of itself once it has loaded its model.

        Raises:
            RankError: one did not within ``start_timeout_s``; all are ended then.
        """
        limit = self._settings.start_timeout_s
        try:
            self._places = self._wait(
                "starting its process", self._settling, limit, "start_timeout_s"
            ).results()
            return self._wait("start", self._starting, limit, "start_timeout_s").results()
        except BaseException:
            self.end("a failed start")
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank answers.

        Raises:
            Exception: what the ranks raised, as it was raised, if all of them refused and none is the worse
                for it; they go on.
            RankError: any other failure: names the rank that failed first, and its cause. All are ended, but
                for a single rank that has only raised.
        """
        with self._lock:
            number, asked = self._ask(method, *arguments)
        answers = self._wait(method, asked, self._settings.call_timeout_s, "call_timeout_s")
        try:
            return answers.results()
        except RankError as error:
            failure: Exception = error
            standings = self._standings(number) if answers.refused else []
            if all(standing.unharmed for standing in standings) and len(set(standings)) == 1:
                own = {rank for rank, standing in enumerate(standings) if standing.own}
                failure = answers.refusal(own).original(method, self.world) or error
            elif self.world > 1 or not answers.refused:
                self.end(f"a failure of {method}")
        # Outside the block: what it was found by is no part of what went wrong.
        raise failure

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Ask without waiting; the answers go to :meth:`look`.

        Raises:
            RankError: they were ended.
        """
        with self._lock:
            return self._ask(method, *arguments)[1]

    def look(self, method: str, asked: list[Any], timeout_s: float) -> list[Any] | None:
        """What was answered to :meth:`ask`, or None if that is not all there yet; then look again.

        Raises:
            RankError: a rank raised or died; all are ended.
        """
        answers = self._wait(method, asked, timeout_s, "timeout_s")
        if answers.failures:
            self.end(f"a failure of {method}")
        elif answers.silent:
            return None
        return answers.results()

    def shutdown(self) -> None:
        """Ask the ranks to release everything, wait a bounded time, then end them; idempotent."""
        try:
            if self._actors:
                # They may be dead or busy; either way they are ended.
                with contextlib.suppress(Exception):
                    asked = [actor.shutdown.remote() for actor in self._actors]
                    self._unread.update(asked)
                    self._wait("shutdown", asked, self._settings.shutdown_timeout_s, "shutdown_timeout_s")
        finally:
            self.end("shutdown")

    def end(self, by: str) -> None:
        """End every rank and all that it has started; idempotent, never raises.

        Args:
            by: what ends them, for whoever calls afterwards.
        """
        import ray

        actors = self._actors
        self._actors = list[Any]()
        if not actors:
            return
        self._ended_by = by
        places = self._known_places()
        # Ray may be gone already, and the actors with it.
        with contextlib.suppress(Exception):
            # One that ends by itself is no accident, which Ray would print.
            leaving = [actor.__ray_terminate__.remote() for actor in actors]
            self._unread.update(leaving)
            _wait_for_end(places, leaving, _ORDERLY_S)
        if not places or any(not place.died for place in places):
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor, no_restart=True)
            _wait_for_end(places, [], _ORDERLY_S)
        end_all(places, self._settings.kill_timeout_s)
        unread = self._unread
        self._unread = set[Any]()
        drain(unread, _DRAIN_S)

    def _ask(self, method: str, *arguments: Any) -> tuple[int, list[Any]]:
        import ray

        if not self._actors:
            raise RankError(
                f"policy: {method} was called after {self._ended_by}; start a new one", call=method
            )
        self._number += 1
        # Written down once, however many ranks read it.
        given = arguments if self.world == 1 else [ray.put(argument) for argument in arguments]
        asked = [actor.perform.remote(self._number, method, *given) for actor in self._actors]
        self._unread.update(asked)
        return self._number, asked

    def _wait(self, call: str, asked: list[Any], timeout_s: float, limit: str) -> Answers:
        answers = answers_of(
            call,
            asked,
            self._places,
            timeout_s=timeout_s,
            grace_s=self._settings.grace_s,
            limit=limit,
            collective_timeout_s=self._collective_timeout_s,
        )
        silent = set(answers.silent)
        self._unread.difference_update(asked[rank] for rank in range(self.world) if rank not in silent)
        return answers

    def _standings(self, number: int) -> list[Standing]:
        """Where the ranks stand after a call that all of them refused; nothing if they do not tell."""
        with self._lock:
            asked = [actor.standing.remote(number) for actor in self._actors]
            self._unread.update(asked)
        answers = self._wait("standing", asked, self._settings.grace_s, "grace_s")
        told = [answers.values[rank] for rank in sorted(answers.values)]
        return told if len(told) == self.world else []

    def _known_places(self) -> list[ProcessPlace]:
        import ray

        known = [place for place in self._places if place is not None]
        if not known:
            # It never came to waiting for them.
            for settling in self._settling:
                with contextlib.suppress(Exception):
                    known.append(ray.get(settling, timeout=0.01))
        return known


def _wait_for_end(places: list[ProcessPlace], leaving: list[Any], timeout_s: float) -> None:
    """Return when the processes are gone, as far as this machine can tell, and these answers are there."""
    import ray

    deadline = time.monotonic() + timeout_s
    while any(place.here and not place.died for place in places) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    if leaving:
        ray.wait(leaving, num_returns=len(leaving), timeout=max(deadline - time.monotonic(), 0))


def _actor_class(rank_class: type[PolicyRank], ranks: RankSettings, settings: GroupSettings) -> Any:
    import ray

    from rl_actor_envs.runtime import make_actor_runtime_env

    env_vars = dict(settings.env_vars)
    if ranks.policy.layout.tensor > 1:
        # What megatron asks for, so that its sums over the group overlap with the next product.
        env_vars.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    runtime_env = make_actor_runtime_env(settings.environment or rank_class, env_vars=env_vars)
    actor: Any = ray.remote(rank_class)
    return actor.options(
        num_cpus=settings.num_cpus,
        num_gpus=settings.num_gpus,
        max_restarts=0,
        max_task_retries=0,
        runtime_env=dict(runtime_env),
    )
