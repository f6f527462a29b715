"""What an engine's process does with a bucket: opens it, whichever way it came."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import torch

from .contract import Bucket, TransportName
from .settings import TransportSettings
from .transports.base import Receiver
from .transports.registry import make_receiver


class BucketReader:
    """Opens buckets of any transport; one for each process that loads weights.

    Args:
        settings: those of the policy's side.
    """

    def __init__(self, settings: TransportSettings | None = None) -> None:
        self._settings = settings or TransportSettings()
        self._receivers: dict[TransportName, Receiver] = {}

    @contextlib.contextmanager
    def reading(self, bucket: Bucket) -> Generator[Iterator[tuple[str, torch.Tensor]]]:
        """The scope in which the tensors of one bucket, see :meth:`tensors`, are valid.

        Raises:
            GenerationError: as :meth:`tensors`.
        """
        tensors = self.tensors(bucket)
        try:
            yield tensors
        finally:
            self._receivers[bucket.transport].done()

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of one bucket, without a copy where the transport can.

        What can go wrong does so in the call itself, before the first tensor is given. They are valid until
        :meth:`reading` ends, or the next bucket is opened. They may be read-only; keep a copy, not a tensor.

        Raises:
            RefitError: the bytes cannot be reached, or are not what the bucket says.
            UnavailableBackendError: what the transport needs is missing here.
        """
        receiver = self._receivers.get(bucket.transport)
        if receiver is None:
            receiver = make_receiver(bucket.transport, self._settings)
            self._receivers[bucket.transport] = receiver
        return receiver.tensors(bucket)

    def close(self) -> None:
        """Give back what transports hold; idempotent. Between refits or at the end."""
        while self._receivers:
            _, receiver = self._receivers.popitem()
            receiver.close()
