"""Buckets that only this process can open, put where the engine's own processes can."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..refit.buckets import Filled, view
from ..refit.contract import Bucket
from ..refit.receive import BucketReader
from ..refit.settings import TransportSettings
from ..refit.transports.shared_memory import SharedMemorySender


class LocalRelay:
    """Ray's store can be read by the actor alone; from there shared memory reaches its engine."""

    def __init__(self) -> None:
        self._reader = BucketReader()

    @contextmanager
    def nearby(self, bucket: Bucket) -> Generator[Bucket]:
        """The scope in which the bytes can be read by any process on this machine.

        Raises:
            RefitError: they cannot be reached, or there is no room for a copy.
        """
        if bucket.transport != "object_store":
            yield bucket
            return
        sender = SharedMemorySender(TransportSettings())
        try:
            sender.open(bucket.nbytes)
            buffer = sender.buffer()
            places = {place.name: place for place in bucket.tensors}
            for name, tensor in self._reader.tensors(bucket):
                view(buffer, places[name]).copy_(tensor)
            yield sender.publish(Filled(bucket.tensors, bucket.nbytes))
        finally:
            sender.close()
