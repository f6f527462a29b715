"""What the fleet needs of one replica, whatever engine is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..protocol import Completion, GenerationRequest
from ..refit.contract import RefitTarget


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a started engine says about itself.

    Attributes:
        max_context: the most tokens that prompt and completion may have together.
        vocab_size: token ids lie below it.
        weight_version: of the weights that it loaded.
        pid: of the process that holds the weights.
    """

    max_context: int
    vocab_size: int
    weight_version: int
    pid: int


class Engine(RefitTarget, Protocol):
    """What a replica and the actor that it may stand for have in common.

    Every call ends within a deadline. Failures are the types of :mod:`rl_generation.failures`; an ``infra``
    one may be tried on another replica.
    """

    async def start(self, *, stale: bool = False) -> ReplicaFacts:
        """Start the process, or start it again after it died, and load the initial weights.

        Args:
            stale: the initial weights are of an old version, so nothing is sampled from them: before a refit
                completes, every request, over HTTP too, is answered with
                :class:`~rl_generation.failures.StaleWeightsError` (a 503).
        """
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests."""
        ...

    async def probe(self) -> None:
        """Sample one token for real; raises if that fails."""
        ...

    async def pause(self) -> None:
        """Stop sampling; requests in flight keep what they have.

        Raises:
            BusyError: they have to end first and did not in time; the engine samples as before. This and any
                failure that is not ``infra`` is a refusal; after another one nobody knows its state.
        """
        ...

    async def resume(self) -> None:
        """Undo :meth:`pause`."""
        ...

    async def sleep(self) -> None:
        """Give memory back.

        Raises:
            BusyError: requests are in flight; the engine samples as before.
            GenerationError: as of :meth:`pause`, a refusal.
        """
        ...

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    async def health(self) -> dict[str, Any]:
        """Facts for the log.

        ``sampled_tokens``, if an engine counts them, grows while it works: then a probe that waits behind
        real work does not make the replica suspect.
        """
        ...

    async def shutdown(self, timeout_s: float) -> None:
        """Release everything; idempotent, returns within ``timeout_s``."""
        ...


class Replica(Engine, Protocol):
    """One engine as the fleet sees it, in this process or elsewhere."""

    @property
    def name(self) -> str:
        """Stands in every error and log line."""
        ...

    async def reserve(self) -> str | None:
        """Bind the server's socket before the engine loads; its URL, or ``None`` if this one serves no HTTP.

        Until :meth:`start` returns, requests to it are answered with a typed 503. After a death the same
        address is bound again where that is possible.
        """
        ...

    async def kill(self) -> None:
        """End the process at once; idempotent, never raises."""
        ...


class EngineActor(Engine, Protocol):
    """What an actor class offers, so that :class:`~rl_generation.fleet.ray_replica.RayReplica` can use it.

    Its constructor takes settings only and does nothing that can fail: Ray passes on what a method raises,
    and of a constructor only a text.
    """

    async def reserve(self, port: int = 0) -> str | None:
        """As :meth:`Replica.reserve`; ``port`` is the one to bind if it is free, 0 is any."""
        ...
