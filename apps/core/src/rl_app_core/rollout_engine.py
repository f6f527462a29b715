"""The run's engine as its rollouts see it: always on the policy's newest weights, and measured."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from rl_generation.failures import GenerationError, NoReplicaError
from rl_generation.fleet.fleet import Fleet
from rl_generation.fleet.states import ReplicaState
from rl_generation.protocol import Completion, GenerationRequest
from rl_generation.refit.contract import WeightSource

from .chat_model import TokenEngine

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5


class VersionedSource(WeightSource, Protocol):
    """A policy whose weights can be handed over, and that counts how often they have changed."""

    def weight_version(self) -> int:
        """Grows with every update."""
        ...


class VersionedEngine(TokenEngine, Protocol):
    """An engine on the policy's own weights."""

    def weight_version(self) -> int:
        """How many updates have made them."""
        ...


class RolloutEngine(TokenEngine, Protocol):
    """What a run samples with. :meth:`generate` is :meth:`refresh` and then :meth:`sample`."""

    def refresh(self) -> None:
        """Bring it the policy's newest weights, and replicas that are back the present ones.

        :meth:`generate` does it itself. Over HTTP nobody sees a request come, so it is done before. The
        policy must not be training meanwhile.

        Raises:
            GenerationError: no replica could take the new weights, or none is left.
        """
        ...

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, from whatever weights it has; from any thread.

        Raises:
            GenerationError: no replica could serve, or a request is at fault.
        """
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that it samples from now."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Numbers since the last call, ready to log.

        ``engine_seconds`` in which something was sampled (not decoded greedily) and
        ``generation_tokens_per_second`` in them, if anything was; with an engine apart from the policy also
        ``refit_seconds``, where weights were handed over, ``replicas_serving`` now, and since the start
        ``replica_restarts`` and ``requests_sent_again``.
        """
        ...


class ColocatedEngine:
    """An engine that shares the policy's weights, so nothing is handed over."""

    def __init__(self, engine: VersionedEngine) -> None:
        self._engine = engine
        self._meter = _Meter()

    @property
    def weight_version(self) -> int:
        """See :class:`RolloutEngine`."""
        return self._engine.weight_version()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        return self.sample(requests)

    def refresh(self) -> None:
        """See :class:`RolloutEngine`; there is nothing to do."""

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`RolloutEngine`."""
        return self._meter.sampling(self._engine.generate, requests)

    def take_metrics(self) -> dict[str, float]:
        """See :class:`RolloutEngine`."""
        return self._meter.take()


class FleetEngine:
    """Replicas apart from the policy. Before anything is sampled they are given its newest weights.

    A replica that died and is back has old weights: it gets the present ones before the next requests, or
    in the midst of those that wait for it.

    Args:
        fleet: a started one.
        policy: where the weights come from.
    """

    def __init__(self, fleet: Fleet, policy: VersionedSource) -> None:
        self._fleet = fleet
        self._policy = policy
        self._meter = _Meter()
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="rollouts")

    @property
    def weight_version(self) -> int:
        """See :class:`RolloutEngine`."""
        return self._fleet.weight_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`.

        Raises:
            GenerationError: no replica could take the new weights or serve, or a request is at fault.
        """
        self._renew()
        return self._meter.sampling(self._sample_and_revive, requests)

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`RolloutEngine`."""
        return self._meter.sampling(self._fleet.generate, requests)

    def take_metrics(self) -> dict[str, float]:
        """See :class:`RolloutEngine`."""
        counts = self._fleet.metrics()
        return {
            **self._meter.take(),
            "replicas_serving": counts["serving"],
            "replica_restarts": counts["restarts"],
            "requests_sent_again": counts["sent_again"],
        }

    def refresh(self) -> None:
        """See :class:`RolloutEngine`; replicas that are back with older weights get them too."""
        self._renew()
        states = self._fleet.states
        if all(state is ReplicaState.RETIRED for state in states.values()):
            # The fleet says so to whoever samples. Who asks over HTTP would only wait.
            raise NoReplicaError(f"fleet: none of its {len(states)} replicas is left; resume the run")

    def close(self) -> None:
        """Let go of its thread; the fleet is its owner's."""
        self._waiter.shutdown(wait=False)

    def _renew(self) -> None:
        version = self._policy.weight_version()
        if version != self._fleet.weight_version:
            self._refit(lambda: self._fleet.update_from(self._policy, version))
        else:
            self._revive()

    def _sample_and_revive(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        answers = self._waiter.submit(self._fleet.generate, requests)
        while not wait([answers], timeout=_LOOK_EVERY_S).done:
            # If every replica has died, this is what the requests wait for.
            self._revive()
        return answers.result()

    def _revive(self) -> None:
        if ReplicaState.STALE not in self._fleet.states.values():
            return
        try:
            self._refit(lambda: self._fleet.refit_stale(self._policy))
        except GenerationError as error:
            # The others serve. If there are none, the requests fail by their own deadline.
            logger.warning("a replica that is back was not given its weights: %s", error)

    def _refit(self, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        try:
            work()
        finally:
            self._meter.refitted(time.perf_counter() - began)


class _Meter:
    """Counts what goes through an engine, from any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refit_seconds = 0.0
        self._seconds = 0.0
        self._tokens = 0
        self._active = 0
        self._since = 0.0

    def sampling(
        self,
        generate: Callable[[Sequence[GenerationRequest]], list[Completion]],
        requests: Sequence[GenerationRequest],
    ) -> list[Completion]:
        if all(request.sampling.temperature == 0 for request in requests):
            return generate(requests)
        self._count(1)
        answers: list[Completion] = []
        try:
            answers = generate(requests)
        finally:
            self._count(-1, sum(len(answer.token_ids) for answer in answers))
        return answers

    def refitted(self, seconds: float) -> None:
        with self._lock:
            self._refit_seconds += seconds

    def take(self) -> dict[str, float]:
        with self._lock:
            self._settle()
            metrics: dict[str, float] = {}
            if self._seconds > 0:
                metrics["engine_seconds"] = self._seconds
                metrics["generation_tokens_per_second"] = self._tokens / self._seconds
            if self._refit_seconds > 0:
                metrics["refit_seconds"] = self._refit_seconds
            self._refit_seconds, self._seconds, self._tokens = 0.0, 0.0, 0
            return metrics

    def _count(self, calls: int, tokens: int = 0) -> None:
        with self._lock:
            self._settle()
            self._active += calls
            self._tokens += tokens

    def _settle(self) -> None:
        """Add the time since the last change, if anything was in flight in it."""
        now = time.perf_counter()
        if self._active:
            self._seconds += now - self._since
        self._since = now
