"""Same node: the policy writes into a file of shared memory, and engines map it.

One segment serves a whole refit. It has two halves, so that one is packed while the other is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...failures import RefitError
from ..buckets import Filled
from ..contract import Bucket, TransportName
from ..settings import TransportSettings
from .base import require_transport, tensors_in
from .segments import Segment, map_segment, page_aligned, shared_folder, sweep

NAME: TransportName = "shared_memory"


class SharedMemorySender:
    """See :class:`~rl_generation.refit.transports.base.Sender`."""

    slots = 2

    def __init__(self, settings: TransportSettings) -> None:
        self._folder = shared_folder(settings.folder)
        self._segment: Segment | None = None
        self._capacity = 0
        self._half = 0
        self._next = 0

    def open(self, capacity: int) -> None:
        """Sweep what dead policies left behind, and make the segment.

        Raises:
            RefitError: the folder has no room.
        """
        self.close()
        sweep(self._folder)
        self._capacity, self._half, self._next = capacity, page_aligned(capacity), 0
        self._segment = Segment(2 * self._half, self._folder)

    def buffer(self) -> torch.Tensor:
        """The half that was not packed last."""
        segment = self._require_open()
        return segment.buffer[self._next : self._next + self._capacity]

    def publish(self, filled: Filled) -> Bucket:
        """Say where the half is; its bytes are there for readers already."""
        segment = self._require_open()
        location = {"path": segment.path, "offset": self._next}
        self._next = self._half - self._next
        return Bucket(NAME, location, filled.nbytes, filled.places)

    def send(self, bucket: Bucket) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Unlink the segment; idempotent."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _require_open(self) -> Segment:
        if self._segment is None:
            raise RefitError("refit: shared memory was used before it was opened")
        return self._segment


class SharedMemoryReceiver:
    """See :class:`~rl_generation.refit.transports.base.Receiver`."""

    def __init__(self, settings: TransportSettings) -> None:
        self._folder = shared_folder(settings.folder)

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the policy's own bytes.

        Raises:
            RefitError: the segment is gone, or is not one of this user in the agreed folder.
        """
        require_transport(bucket, NAME)
        try:
            path, offset = str(bucket.location["path"]), int(bucket.location["offset"])
        except (KeyError, TypeError, ValueError) as error:
            raise RefitError(f"refit: {bucket.location!r} is no place in shared memory") from error
        # A mapping for each bucket: whatever a reader wrote into the last one is gone with it.
        return tensors_in(map_segment(path, offset, bucket.nbytes, self._folder), bucket)

    def close(self) -> None:
        """Nothing is held."""
