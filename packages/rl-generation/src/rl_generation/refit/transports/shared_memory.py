"""Same node: the policy writes into shared memory, and engines map it.

One segment serves a whole refit. It has four slots: two buckets are with the engines, one being loaded and
one waiting there, while others are packed. What is not large stays, and stays mapped, for the next refit: the
first touch of its pages costs as much as a quarter of a refit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...failures import RefitError
from ..buckets import Capacity, Filled
from ..contract import Bucket, TransportName
from ..settings import TransportSettings
from .base import require_transport, tensors_in
from .segments import Segment, SegmentView, page_aligned
from .slots import LARGE, Slots

NAME: TransportName = "shared_memory"


class SharedMemorySender:
    """See :class:`~rl_generation.refit.transports.base.Sender`.

    Args:
        settings: how much is kept.
        slots: one suffices for one bucket.
    """

    def __init__(self, settings: TransportSettings, slots: int = 4) -> None:
        self.slots = slots
        self._kept_bytes = settings.kept_bytes
        self._segment: Segment | None = None
        self._key = ""
        self._capacity = Capacity(0)
        self._used = Slots(0, 0)
        self._slot = 0

    def open(self, capacity: Capacity) -> None:
        """Get the segment, or take the one of the last refit again.

        Raises:
            RefitError: there is no room.
            UnavailableBackendError: this system has no such memory.
        """
        self._capacity, self._used = capacity, Slots(self.slots, capacity.bucket)
        nbytes = self._large_at() + capacity.largest
        if self._segment is not None and self._segment.nbytes != nbytes:
            self.close()
        if self._segment is None:
            self._segment = Segment(nbytes)
        self._key = self._segment.renew()

    def room(self, nbytes: int) -> bool:
        """Whether a slot is free."""
        return self._used.room(nbytes)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A free slot."""
        segment = self._require_open()
        self._slot = self._used.take(nbytes)
        size = nbytes if self._slot == LARGE else self._capacity.bucket
        return segment.buffer[self._offset() : self._offset() + size]

    def publish(self, filled: Filled) -> Bucket:
        """Say where the slot that was filled last is; its bytes are there for readers already."""
        segment = self._require_open()
        location = {
            "place": segment.place,
            "inode": segment.inode,
            "key": self._key,
            "offset": self._offset(),
        }
        # Nothing waits at the engines behind one that is alone in its slot: another could not be packed.
        window = 1 if self._slot == LARGE or self.slots == 1 else 2
        return Bucket(NAME, location, filled.nbytes, filled.places, window=window)

    def send(self, bucket: Bucket) -> None:
        """Nothing is left to do."""

    def free(self) -> None:
        """Its slot can be packed again."""
        self._used.free()

    def rest(self) -> None:
        """Let nothing published be read any more; idempotent. Keeps the segment, if it is not large."""
        segment = self._segment
        self._key = ""
        if segment is not None:
            segment.revoke()
            if segment.nbytes > self._kept_bytes:
                self.close()

    def close(self) -> None:
        """Give the segment back; idempotent."""
        segment, self._segment, self._key = self._segment, None, ""
        if segment is not None:
            segment.close()

    def _offset(self) -> int:
        return self._large_at() if self._slot == LARGE else self._slot * page_aligned(self._capacity.bucket)

    def _large_at(self) -> int:
        return self.slots * page_aligned(self._capacity.bucket)

    def _require_open(self) -> Segment:
        if self._segment is None or not self._key:
            raise RefitError("refit: shared memory was used before it was opened")
        return self._segment


class SharedMemoryReceiver:
    """See :class:`~rl_generation.refit.transports.base.Receiver`."""

    def __init__(self, settings: TransportSettings) -> None:
        self._kept_bytes = settings.kept_bytes
        self._view: SegmentView | None = None
        self._reading: SegmentView | None = None

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the policy's own bytes.

        Raises:
            RefitError: the segment is gone, or is not one of this user.
        """
        require_transport(bucket, NAME)
        location = bucket.location
        try:
            place, key = str(location["place"]), str(location["key"])
            inode, offset = int(location["inode"]), int(location["offset"])
        except (KeyError, TypeError, ValueError) as error:
            raise RefitError(f"refit: {location!r} is no place in shared memory") from error
        view = self._view_of(place, inode, offset, bucket.nbytes)
        view.require_key(key)
        self._reading = view
        return tensors_in(view.part(offset, bucket.nbytes), bucket)

    def done(self) -> None:
        """Forget what was written to them."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.settle()

    def close(self) -> None:
        """Unmap."""
        self._view = self._reading = None

    def _view_of(self, place: str, inode: int, offset: int, nbytes: int) -> SegmentView:
        if self._view is not None and self._view.identity == (place, inode):
            return self._view
        # Before the next one is mapped: it may be the last to hold the memory of one that was given back.
        self._view = self._reading = None
        view = SegmentView(place, inode, offset, nbytes, whole_up_to=self._kept_bytes)
        self._view = view if view.whole else None
        return view
