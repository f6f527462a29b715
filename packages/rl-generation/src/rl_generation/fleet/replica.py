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


class Replica(RefitTarget, Protocol):
    """One engine, in this process or elsewhere. Every call ends within a deadline of the implementation's.

    Failures are the types of :mod:`rl_generation.failures`; an ``infra`` one may be tried on another replica.
    """

    @property
    def name(self) -> str:
        """Stands in every error and log line."""
        ...

    async def reserve(self) -> str | None:
        """Bind the server's socket before the engine loads; its URL, or ``None`` if this one serves no HTTP.

        Until :meth:`start` returns, requests to it are answered with a typed 503.
        """
        ...

    async def start(self) -> ReplicaFacts:
        """Start the process, or start it again after it died, and load the initial weights."""
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests."""
        ...

    async def probe(self) -> None:
        """Sample one token for real; raises if that fails."""
        ...

    async def pause(self) -> None:
        """Stop sampling; requests in flight keep what they have."""
        ...

    async def resume(self) -> None:
        """Undo :meth:`pause`."""
        ...

    async def sleep(self) -> None:
        """Give memory back."""
        ...

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    async def health(self) -> dict[str, Any]:
        """Facts for the log."""
        ...

    async def kill(self) -> None:
        """End the process at once; idempotent, never raises."""
        ...

    async def shutdown(self, timeout_s: float) -> None:
        """Ask it to release everything, then end it; idempotent, returns within ``timeout_s``."""
        ...
