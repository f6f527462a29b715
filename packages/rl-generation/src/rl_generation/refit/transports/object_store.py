"""Anywhere in a Ray cluster: buckets are objects in Ray's store, which moves them between nodes."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ...failures import RefitError, UnavailableBackendError
from ..buckets import Capacity, Filled
from ..contract import Bucket, TransportName
from ..settings import TransportSettings
from .base import require_transport, tensors_in

NAME: TransportName = "object_store"


class ObjectStoreSender:
    """See :class:`~rl_generation.refit.transports.base.Sender`."""

    slots = 2

    def __init__(self, settings: TransportSettings) -> None:
        self._buffer: torch.Tensor | None = None
        self._references: deque[Any] = deque()

    def open(self, capacity: Capacity) -> None:
        """Get a buffer; the store copies it with each bucket.

        Raises:
            UnavailableBackendError: Ray is not installed, or this process has not joined a cluster.
        """
        _require_ray()
        self._references.clear()
        self._buffer = torch.empty(capacity.any, dtype=torch.uint8)

    def room(self, nbytes: int) -> bool:
        """Whether fewer buckets are in the store than may be."""
        return len(self._references) < self.slots

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The same one each time."""
        if self._buffer is None:
            raise RefitError("refit: the object store was used before it was opened")
        return self._buffer

    def publish(self, filled: Filled) -> Bucket:
        """Put the bytes into the store; they stay until they are freed."""
        reference = _require_ray().put(self.buffer(0)[: filled.nbytes].numpy())
        self._references.append(reference)
        return Bucket(NAME, reference, filled.nbytes, filled.places)

    def send(self, bucket: Bucket) -> None:
        """Nothing is left to do."""

    def free(self) -> None:
        """Let the store forget it."""
        if self._references:
            self._references.popleft()

    def rest(self) -> None:
        """Nothing stays."""
        self.close()

    def close(self) -> None:
        """Let the store forget the buckets; idempotent."""
        self._references.clear()
        self._buffer = None


class ObjectStoreReceiver:
    """See :class:`~rl_generation.refit.transports.base.Receiver`."""

    def __init__(self, settings: TransportSettings) -> None:
        self._timeout_s = settings.timeout_s

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the store's memory, which must not be written to.

        Raises:
            RefitError: the object is lost, its owner died, or it did not come within the deadline.
            UnavailableBackendError: Ray is not installed, or this process has not joined a cluster.
        """
        require_transport(bucket, NAME)
        ray = _require_ray()
        try:
            received = ray.get(bucket.location, timeout=self._timeout_s)
        except (ray.exceptions.RayError, TypeError, ValueError) as error:
            raise RefitError(
                f"refit: a bucket of {bucket.nbytes} bytes did not come out of Ray's store within "
                f"{self._timeout_s:g} s: {type(error).__name__}"
            ) from error
        return tensors_in(_as_tensor(received), bucket)

    def done(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


def _as_tensor(array: Any) -> torch.Tensor:
    import numpy

    if not isinstance(array, numpy.ndarray) or array.dtype != numpy.uint8 or not array.flags.c_contiguous:
        raise RefitError(f"refit: Ray's store gave a {type(array).__name__} for a bucket; expected its bytes")
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # Torch warns of every array that is read-only, as those of the store are, and no filter of warnings is
    # safe with threads.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    # Keeps the store from taking the memory back while a view is in use.
    memory.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def _require_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UnavailableBackendError(
            "refit: the object store needs Ray, which is not installed; install rl-generation[ray] or choose "
            "another transport"
        ) from error
    if not ray.is_initialized():
        raise UnavailableBackendError(
            "refit: the object store needs a Ray cluster, which this process has not joined; call ray.init "
            "or choose another transport"
        )
    return ray
