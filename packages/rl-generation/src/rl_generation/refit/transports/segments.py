"""Shared memory without a name: opened by way of the owner's process, and gone with it, however it ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
import weakref

import torch

from ...failures import RefitError, UnavailableBackendError
from .pages import drop_private_pages, page_faults

NAME = "rl-generation-refit"
HEADER = mmap.ALLOCATIONGRANULARITY
"""Bytes before the first one of the buffer; they hold the key."""

_KEY_BYTES = 16
_PLACE = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")
# Of linux/mman.h; Python has no name for it.
_MADV_POPULATE_READ = 22


def page_aligned(nbytes: int) -> int:
    """The next multiple of the granularity at which memory is mapped; at least one."""
    return max(1, -(-nbytes // mmap.ALLOCATIONGRANULARITY)) * mmap.ALLOCATIONGRANULARITY


class Segment:
    """Memory that other processes of this user, in the same container, map by its :attr:`place`.

    It opens with a key. Whoever reads compares it with the one that was told, so that nothing told before
    :meth:`renew` or :meth:`revoke` can be read any more.

    Args:
        nbytes: of the buffer, > 0; the memory is there when the constructor returns.

    Attributes:
        place: where this process has it open.
        inode: tells it from another one that gets the same place later.
        buffer: ``[nbytes]`` uint8.

    Raises:
        RefitError: there is no room.
        UnavailableBackendError: this system has no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        create = getattr(os, "memfd_create", None)
        if create is None:
            raise UnavailableBackendError(
                "refit: shared memory needs Linux, which this system is not; choose the transport "
                "object_store"
            )
        self.nbytes = nbytes
        try:
            descriptor = create(NAME, os.MFD_CLOEXEC)
        except OSError as error:
            raise RefitError(
                f"refit: this process may not make shared memory: {error.strerror}; allow memfd_create, or "
                "choose the transport object_store"
            ) from error
        self._end = weakref.finalize(self, os.close, descriptor)
        try:
            os.fchmod(descriptor, 0o600)
            # Without it a lack of memory is found out by SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, HEADER + nbytes)
            memory = mmap.mmap(descriptor, HEADER + nbytes)
        except OSError as error:
            self._end()
            raise RefitError(
                f"refit: no room for {nbytes} bytes of shared memory: {error.strerror}; give this machine or "
                "container more, or lower bucket_bytes"
            ) from error
        self.place = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.inode = os.fstat(descriptor).st_ino
        self._key: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8, count=_KEY_BYTES)
        self.buffer: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER)

    def renew(self) -> str:
        """Put another key and return it."""
        key = secrets.token_bytes(_KEY_BYTES)
        self._key.copy_(torch.frombuffer(bytearray(key), dtype=torch.uint8))
        return key.hex()

    def revoke(self) -> None:
        """Let no key fit."""
        self._key.zero_()

    def close(self) -> None:
        """Revoke, and let go of the memory; idempotent. Readers keep what they have mapped."""
        if self._end.alive:
            self.revoke()
            self._key = self.buffer = torch.empty(0, dtype=torch.uint8)
            self._end()


class SegmentView:
    """A segment, or one part of it, mapped into a reader's process without a copy.

    The mapping is private: what is written to a part changes neither the segment nor what others read, nor
    what the next part shows. What the owner writes later shows through.

    Args:
        place: of the segment.
        inode: of the segment.
        offset: of the part that is wanted, within the segment's buffer; a multiple of the page size.
        nbytes: of the part.
        whole_up_to: a segment of no more bytes is mapped with all its parts.

    Attributes:
        whole: whether all parts are mapped.

    Raises:
        RefitError: the place is elsewhere, gone, or not memory of this kind and of this user alone; or the
            part does not lie in it.
    """

    def __init__(self, place: str, inode: int, offset: int, nbytes: int, *, whole_up_to: int = 0) -> None:
        self.identity = (place, inode)
        descriptor = _open(place, inode)
        try:
            size = os.fstat(descriptor).st_size - HEADER
            _require_within(place, size, offset, nbytes)
            self.whole = size <= whole_up_to
            self._start, self._nbytes = (0, size) if self.whole else (offset, nbytes)
            self._key = mmap.mmap(descriptor, _KEY_BYTES, prot=mmap.PROT_READ)
            self._memory = _map(descriptor, HEADER + self._start, self._nbytes)
        finally:
            os.close(descriptor)
        empty = torch.empty(0, dtype=torch.uint8)
        self._given: tuple[int, torch.Tensor] | None = None
        self._faults = 0
        self._buffer = empty if self._memory is None else torch.frombuffer(self._memory, dtype=torch.uint8)

    def require_key(self, key: str) -> None:
        """Refuse what is not meant to be read any more.

        Raises:
            RefitError: the segment has another key.
        """
        if self._key[:_KEY_BYTES].hex() != key:
            raise RefitError(
                f"refit: the bucket at {self.identity[0]} is gone; its owner has ended that refit"
            )

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """``[nbytes]`` uint8 as the owner sees them, until :meth:`settle` or the next part.

        Args:
            offset: within the segment's buffer, a multiple of the page size.
            nbytes: from there.

        Raises:
            RefitError: the part is not mapped.
        """
        start = offset - self._start
        _require_within(self.identity[0], self._nbytes, start, nbytes)
        self.settle()
        part = self._buffer[start : start + nbytes]
        self._given, self._faults = (start, part), page_faults()
        return part

    def settle(self) -> None:
        """Forget what was written to the part that was given last; it is not used any more. Idempotent."""
        given, self._given = self._given, None
        if given is None or self._memory is None or not given[1].numel():
            return
        # The first write to a page of a private mapping is a fault.
        faults = page_faults()
        if faults != self._faults or not faults:
            drop_private_pages(self._memory, *given)


def _open(place: str, inode: int) -> int:
    if not _PLACE.fullmatch(place):
        raise RefitError(f"refit: {place!r} is no place of shared memory; refused")
    try:
        # Before it is opened, which could do something to a thing of another kind.
        _require_ours(place, os.stat(place), inode)
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError as error:
        raise RefitError(
            f"refit: {place} is gone; its owner died, or runs on another node or in another container"
        ) from error
    except OSError as error:
        raise RefitError(
            f"refit: {place} cannot be opened: {error.strerror}; policy and engine have to run as the same "
            "user; else choose the transport object_store"
        ) from error
    try:
        _require_ours(place, os.fstat(descriptor), inode)
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{NAME}"):
            raise RefitError(f"refit: {place} is not shared memory of a refit; refused")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_ours(place: str, facts: os.stat_result, inode: int) -> None:
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise RefitError(
            f"refit: {place} has mode {stat.filemode(facts.st_mode)} and owner {facts.st_uid}; expected "
            f"memory of user {os.geteuid()} alone; refused"
        )
    if facts.st_ino != inode:
        raise RefitError(f"refit: {place} is gone; something else is open there now")


def _require_within(place: str, size: int, offset: int, nbytes: int) -> None:
    if min(offset, nbytes) < 0 or offset % mmap.ALLOCATIONGRANULARITY or offset + nbytes > size:
        raise RefitError(
            f"refit: {place} holds {size} bytes; a bucket of {nbytes} at {offset} cannot be in it"
        )


def _map(descriptor: int, offset: int, nbytes: int) -> mmap.mmap | None:
    if nbytes == 0:
        return None
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=protection, offset=offset)
    # Saves a tenth of the time; kernels before 5.14 refuse. MAP_POPULATE would copy every page.
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_POPULATE_READ)
    return memory
