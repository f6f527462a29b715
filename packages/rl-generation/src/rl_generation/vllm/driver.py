"""What differs between vLLM's engines: the asynchronous beside this process, the synchronous one in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..protocol import Completion, GenerationRequest
from .prompt_scores import PromptScores

Version = Callable[[], int]
"""Says which weights are loaded at the time of the call."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A loaded model.

    Attributes:
        max_context: the most tokens that prompt and completion may have together.
        vocab_size: token ids lie below it.
        tied: whether the head is the embedding.
        pid: of the process that holds the weights, or the first of them.
        processes: ids of the processes without which it is dead, parents first.
    """

    max_context: int
    vocab_size: int
    tied: bool
    pid: int
    processes: tuple[int, ...]


class Driver(Protocol):
    """One engine of vLLM. All calls come from one event loop; what blocks, does so elsewhere.

    Failures are vLLM's own; the caller converts them and gives every call a deadline.
    """

    @property
    def engine(self) -> Any:
        """vLLM's own object, ``None`` before the launch."""
        ...

    async def launch(self) -> Launched:
        """Start, and load the checkpoint."""
        ...

    def when_dead(self, callback: Callable[[str], None]) -> None:
        """Have ``callback`` called on the loop as soon as a process has ended, with words on it."""
        ...

    async def sample(self, requests: Sequence[GenerationRequest], version: Version) -> list[Completion]:
        """Completions in the order of the requests; cancelling ends them inside the engine.

        Args:
            requests: what to sample.
            version: of the weights now, for an engine that does not note it with each token. Asked as soon as
                a request has its tokens: it may have waited behind a refit before.
        """
        ...

    async def score(self, token_ids: tuple[int, ...], top: int = 0) -> PromptScores:
        """Log-probability of each token but the first at temperature 1, and the ``top`` most likely ones."""
        ...

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker; the answers, by rank."""
        ...

    async def hold(self) -> None:
        """Stop sampling, requests keep what they have; returns when nothing computes any more."""
        ...

    async def let_go(self) -> None:
        """Undo :meth:`hold`."""
        ...

    async def drop_caches(self) -> None:
        """Forget everything that was computed from the weights; held requests are computed anew."""
        ...

    async def note_version(self, version: int) -> None:
        """Tokens that are sampled from now on are of this version."""
        ...

    async def abort_all(self) -> None:
        """End all requests with what they have."""
        ...

    async def sleep(self) -> None:
        """Give memory back, where that is possible."""
        ...

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    def counters(self) -> dict[str, int]:
        """Numbers for the log, such as ``sampled_tokens``; cheap."""
        ...

    def in_flight(self) -> int:
        """Requests that have begun and not ended."""
        ...

    async def close(self, timeout_s: float) -> None:
        """End all processes, by force if they do not within ``timeout_s``; idempotent."""
        ...
