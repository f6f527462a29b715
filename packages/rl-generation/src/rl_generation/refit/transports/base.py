"""What every transport does on either side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ...failures import RefitError
from ..buckets import Capacity, Filled, view
from ..contract import Bucket, TransportName


class Sender(Protocol):
    """The policy's side. A refit is open, then buffer, publish, send for each bucket, then rest."""

    @property
    def slots(self) -> int:
        """Buckets whose bytes are kept at the same time; with two, one is packed while another is read."""
        ...

    def open(self, capacity: Capacity) -> None:
        """Get buffers.

        Raises:
            RefitError: there is no room for them.
            UnavailableBackendError: what the transport needs is missing here.
        """
        ...

    def room(self, nbytes: int) -> bool:
        """Whether there is a buffer for a bucket that begins with a tensor of ``nbytes``, without a wait."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """``[at least nbytes]`` uint8: where to pack the next bucket. There must be :meth:`room`, unless
        ``slots`` is 1; then it may be waited for, and ``nbytes`` does not count.
        """
        ...

    def publish(self, filled: Filled) -> Bucket:
        """Make the buffer that was packed last reachable."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Called when the bucket is handed out; returns without waiting for whoever takes it."""
        ...

    def free(self) -> None:
        """Say that of those published the first that was not freed yet has been read."""
        ...

    def rest(self) -> None:
        """End a refit that nobody packs or reads any more: what was published is gone; idempotent.

        What makes the next :meth:`open` faster may stay.
        """
        ...

    def close(self) -> None:
        """Give everything back; idempotent, whatever went wrong before."""
        ...


class Receiver(Protocol):
    """The engine's side; may serve many refits."""

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, without a copy where the transport can; opened and checked by the call itself.

        They are valid until :meth:`done`; whoever keeps one copies it.

        Raises:
            RefitError: the bytes cannot be reached, or are not what the bucket says.
            UnavailableBackendError: what the transport needs is missing here.
        """
        ...

    def done(self) -> None:
        """Say that the tensors of the last bucket are not used any more; idempotent, also after a failure."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


def require_transport(bucket: Bucket, name: TransportName) -> None:
    """Refuse a bucket that came by another way.

    Raises:
        RefitError: naming both ways.
    """
    if bucket.transport != name:
        raise RefitError(f"refit: a bucket sent by {bucket.transport} was opened as {name}")


def tensors_in(buffer: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of a whole received buffer, all checked by the call itself.

    Args:
        buffer: ``[nbytes]`` uint8.
        bucket: what lies in it.

    Raises:
        RefitError: the buffer is shorter than the bucket says, or a place is outside it.
    """
    if buffer.numel() < bucket.nbytes:
        raise RefitError(f"refit: received {buffer.numel()} bytes of a bucket of {bucket.nbytes}")
    views = [(place.name, view(buffer[: bucket.nbytes], place)) for place in bucket.tensors]
    return iter(views)
