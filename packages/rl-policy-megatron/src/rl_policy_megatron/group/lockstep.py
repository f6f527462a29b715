"""A refit over several ranks: rank 0 hands the tensors out, and all ranks gather them.

Each tensor may take a collective of all ranks. Rank 0 reads its stream at the pace of the engines; the others
follow it in a thread, tensor by tensor, and drop what they get.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ..errors import RuntimeStateError
from .settings import SourceFactory, WeightSource

Stream = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class RefitSide(Protocol):
    """One rank's part; its calls come in the order begin, next …, end, on all ranks alike."""

    def begin(self, transport: Any) -> Any: ...

    def next_bucket(self) -> Any: ...

    def end(self) -> None: ...


class LeadingSide:
    """Rank 0's: a source of buckets over the stream.

    Args:
        factory: makes the source.
        spec: what the stream yields.
        stream: of the weights.
    """

    def __init__(self, factory: SourceFactory, spec: Callable[[], Any], stream: Stream) -> None:
        self._stream = stream
        self._reading: Iterator[tuple[str, torch.Tensor]] | None = None
        self._begun = False
        self._source: WeightSource = factory(spec, self._read)

    def begin(self, transport: Any) -> Any:
        """Announce everything."""
        self._reading, self._begun = None, True
        return self._source.begin(transport)

    def next_bucket(self) -> Any:
        """Publish the next part; ``None`` after the last."""
        return self._source.next_bucket()

    def end(self) -> None:
        """Let go of what was published, and read on to the end: the other ranks do so, too."""
        self._source.end()
        if self._begun:
            self._begun = False
            for _ in self._reading or self._stream():
                pass
        self._reading = None

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        reading = self._reading = self._stream()
        # Not `yield from`: who drops this iterator half-way would close the one that end() reads on.
        for item in reading:  # noqa: UP028
            yield item


class FollowingSide:
    """Any other rank's: reads the stream in a thread, because the collectives need it.

    Args:
        stream: of the weights.
        timeout_s: how long ``end`` waits for the thread.
    """

    def __init__(self, stream: Stream, timeout_s: float) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def begin(self, transport: Any) -> None:
        """Start to follow."""
        self._failure = None
        # The current device belongs to a thread, and the stream may ask for it.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._follow, args=(device,), name="refit", daemon=True)
        self._thread.start()

    def next_bucket(self) -> None:
        """Say if following has failed."""
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Wait until the stream is through."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise RuntimeStateError(
                f"refit: the stream of weights was not through {self._timeout_s:g} s after its end; rank 0 "
                "does not read on, restart the policy"
            )
        self.next_bucket()

    def _follow(self, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            for _ in self._stream():
                pass
        except Exception as error:
            self._failure = error
