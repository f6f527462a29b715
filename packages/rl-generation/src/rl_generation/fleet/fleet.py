"""Data-parallel replicas behind the interface of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from ..failures import GenerationError
from ..protocol import Completion, GenerationRequest, RefitSpec
from ..refit.contract import WeightSource
from ..refit.publisher import TensorSource
from .core import FleetCore
from .replica import Replica
from .settings import FleetSettings
from .states import ReplicaState
from .threads import LoopThread

T = TypeVar("T")

# How much longer a calling thread waits than the work's own deadlines take together.
_SLACK_S = 30.0


class Fleet:
    """A :class:`~rl_generation.protocol.Generation` made of replicas.

    It runs on an event loop in a thread of its own, so every method may be called from any thread, and
    :meth:`generate_async` from any event loop.

    Args:
        replicas: at least one; their names differ.
        settings: deadlines and budgets.

    Raises:
        ValueError: no replicas, two with one name, or several that would be refitted by a collective.
    """

    def __init__(self, replicas: Sequence[Replica], settings: FleetSettings | None = None) -> None:
        self._settings = settings or FleetSettings()
        self._loop = LoopThread("fleet")
        try:
            self._core = FleetCore(replicas, self._settings, self._loop.time)
        except BaseException:
            self._loop.close(timeout_s=5.0)
            raise
        self._spec: RefitSpec | None = None

    @property
    def base_urls(self) -> list[str]:
        """URLs of the replicas' servers, in the replicas' order; ``[]`` when they have none.

        Known from :meth:`reserve` on. A replica that had to start again elsewhere has another one then.

        Raises:
            GenerationError: nothing is reserved yet, or only some replicas have a server.
        """
        return self._core.base_urls

    @property
    def weight_version(self) -> int:
        """Version of the weights that the fleet serves."""
        return self._core.version

    @property
    def states(self) -> dict[str, ReplicaState]:
        """Where each replica stands."""
        return {name: member.state for name, member in self._core.members.items()}

    def reserve(self) -> list[str]:
        """Bind the addresses of all servers before anything loads; the :attr:`base_urls`.

        Raises:
            GenerationError: an address could not be bound, or only some replicas have a server.
        """
        return self._call(self._core.reserve(), "reserve", 2 * self._settings.start_timeout_s)

    def start(self) -> None:
        """Load the initial weights of all replicas in parallel.

        All have to start: a machine without enough memory or GPUs is seen at once. After a failure
        everything is ended.

        Raises:
            GenerationError: the first cause.
        """
        settings = self._settings
        self._call(self._core.start(), "start", 4 * settings.start_timeout_s + settings.control_timeout_s)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, by whichever replicas are healthy.

        What fails by a replica's fault is sent to another one, within ``infra_budget`` and
        ``request_timeout_s``.

        Raises:
            NoReplicaError: nobody could serve for ``replica_wait_s``, or the budget is used up.
            DeadlineError: not all was answered in time.
            GenerationError: a request is at fault, or the fleet does not run.
        """
        work = self._core.generate(list(requests))
        return self._call(work, "generate", self._settings.request_timeout_s)

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion, for callers on any event loop; raises as :meth:`generate`."""
        answers = await asyncio.wrap_future(self._loop.submit(self._core.generate([request])))
        return answers[0]

    def prepare_refit(self, spec: RefitSpec) -> None:
        """Announce what :meth:`update_weights` will carry; every replica checks it before a weight moves."""
        self._spec = spec

    def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Publish tensors of this process and refit all live replicas with them.

        Raises:
            GenerationError: without :meth:`prepare_refit`, and as :meth:`update_from`.
        """
        if self._spec is None:
            raise GenerationError("fleet: update_weights was called before prepare_refit(spec)")
        tensors = self._spec.tensors
        self.update_from(TensorSource(lambda: tensors, lambda: stream, self._settings.publishing), version)

    def update_from(self, source: WeightSource, version: int) -> list[str]:
        """Refit all live replicas, also stale ones.

        Every bucket goes to all at the same time. A replica that fails drops out: it is stale or dead, and
        the others go on.

        Args:
            source: read once, from other threads than the caller's.
            version: larger than the present one. It is the fleet's as soon as one replica serves it.

        Returns:
            Names of the replicas that serve the new version.

        Raises:
            RefitError: no replica completed it, or the version does not grow.
            NoReplicaError: none was live within ``replica_wait_s``.
            GenerationError: the source failed, or the fleet does not run.
        """
        return self._call(self._core.refit(source, version), "update_from", self._refit_s)

    def refit_stale(self, source: WeightSource) -> list[str]:
        """Give replicas that missed a refit the weights that the fleet serves; the others are left alone.

        Args:
            source: it has to give the weights of :attr:`weight_version`; it is not read if none is stale.

        Returns:
            Names of the replicas that serve again.

        Raises:
            GenerationError: as :meth:`update_from`.
        """
        return self._call(self._core.refit_stale(source), "refit_stale", self._refit_s)

    def pause(self) -> None:
        """Stop sampling; requests in flight keep what they have, new ones wait.

        Raises:
            GenerationError: a replica refused, such as one whose requests in flight have to end first and do
                not in time; the fleet runs as before.
        """
        self._call(self._core.pause(), "pause", self._control_s)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._call(self._core.resume(), "resume", self._control_s)

    def sleep(self) -> None:
        """Give memory back while the policy trains.

        Raises:
            GenerationError: a generation is in flight, over HTTP too, or the fleet is paused; it runs as
                before.
        """
        self._call(self._core.sleep(), "sleep", self._control_s)

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self._call(self._core.wake(), "wake", self._control_s)

    def health(self) -> dict[str, Any]:
        """Mode, version, and of each replica its state, address, process, load and own facts."""
        return self._call(self._core.health(), "health", self._settings.control_timeout_s)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, for a log.

        ``serving`` replicas; ``requests`` answered and their ``tokens``; ``seconds`` in which requests were
        in flight and ``tokens_per_second`` of them; requests ``sent_again`` after ``failed_calls``;
        ``restarts``; ``refits``, ``refit_seconds`` of the last one and ``refit_seconds_total``.
        """

        async def look() -> dict[str, float]:
            return self._core.metrics()

        return self._call(look(), "metrics", self._settings.control_timeout_s)

    def shutdown(self, timeout_s: float) -> None:
        """End all replicas in parallel, kill those that take too long; idempotent, within ``timeout_s``."""
        if self._loop.closed:
            return
        try:
            self._call(self._core.shutdown(0.9 * timeout_s), "shutdown", timeout_s, slack_s=0.0)
        finally:
            self._loop.close(timeout_s=max(0.1 * timeout_s, 1.0))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(self._settings.control_timeout_s)

    @property
    def _control_s(self) -> float:
        # Waiting for its turn and for a round of probes; doing it; undoing it.
        return 3 * self._settings.refit_call_timeout_s + 2 * self._settings.probe_timeout_s

    @property
    def _refit_s(self) -> float:
        return self._settings.replica_wait_s + self._settings.refit_timeout_s

    def _call(
        self, work: Coroutine[Any, Any, T], what: str, timeout_s: float, slack_s: float = _SLACK_S
    ) -> T:
        return self._loop.call(work, what, timeout_s + slack_s)
