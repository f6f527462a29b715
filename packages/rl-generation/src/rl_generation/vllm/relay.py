"""Buckets that only this process can open, put where the engine's own processes can."""

from __future__ import annotations

import threading

from ..refit.buckets import Capacity, Filled, view
from ..refit.contract import Bucket
from ..refit.receive import BucketReader
from ..refit.settings import TransportSettings
from ..refit.transports.shared_memory import SharedMemorySender


def needs_relay(bucket: Bucket) -> bool:
    """Whether the bytes are in Ray's store, which the actor can read and its engine's processes cannot."""
    return bucket.transport == "object_store"


class RelayedBucket:
    """One bucket's copy in shared memory, made in one thread and given back in another, in whichever order.

    Args:
        bucket: one that :func:`needs_relay`.
        settings: of the policy's side.
    """

    def __init__(self, bucket: Bucket, settings: TransportSettings) -> None:
        self._bucket = bucket
        self._reader = BucketReader(settings)
        self._sender = SharedMemorySender(settings, slots=1)
        # Held for a moment at a time, never while bytes move.
        self._lock = threading.Lock()
        self._ended = self._unwanted = False

    def make(self) -> Bucket:
        """Wait for the bytes and copy them; where they can be read until :meth:`close`. Blocks, once.

        Raises:
            RefitError: they cannot be reached, or there is no room for a copy.
            UnavailableBackendError: this process has no way to Ray's store.
        """
        try:
            return self._copy()
        finally:
            with self._lock:
                self._ended = True
                unwanted = self._unwanted
            if unwanted:
                self._sender.close()

    def close(self) -> None:
        """Give the copy back, as soon as nobody is making it any more. Does not wait for that."""
        with self._lock:
            self._unwanted = True
            ended = self._ended
        if ended:
            self._sender.close()

    def _copy(self) -> Bucket:
        bucket, sender = self._bucket, self._sender
        with self._reader.reading(bucket) as received:
            sender.open(Capacity(bucket.nbytes))
            buffer = sender.buffer(bucket.nbytes)
            places = {place.name: place for place in bucket.tensors}
            for name, tensor in received:
                view(buffer, places[name]).copy_(tensor)
        return sender.publish(Filled(bucket.tensors, bucket.nbytes))
