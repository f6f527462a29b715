"""Which pages of a private mapping its own process has written to, and how they become the file's again."""

from __future__ import annotations

import mmap
import os
import resource

import torch

# Of the kernel's documentation of /proc/pid/pagemap: 8 bytes for each page, these bits of the last.
_ENTRY = 8
_FILE, _SWAPPED, _PRESENT = 1 << 5, 1 << 6, 1 << 7


def page_faults() -> int:
    """How often this process, in any thread, had to be given a page since it began; 0 if nobody counts."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def drop_private_pages(memory: mmap.mmap, start: int, part: torch.Tensor) -> None:
    """Let ``part`` of a private mapping show the file again, wherever this process has written to it.

    Looking costs a hundredth of mapping the part anew. Where the kernel does not tell, all pages are dropped.

    Args:
        memory: the mapping.
        start: of the part within it; a multiple of the page size.
        part: ``[nbytes]`` uint8, within the mapping, not empty.
    """
    if _may_be_private(part.data_ptr(), part.numel()):
        nbytes = min(-(-part.numel() // mmap.PAGESIZE) * mmap.PAGESIZE, len(memory) - start)
        memory.madvise(mmap.MADV_DONTNEED, start, nbytes)


def _may_be_private(address: int, nbytes: int) -> bool:
    pages = -(-nbytes // mmap.PAGESIZE)
    entries = bytearray(pages * _ENTRY)
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        if os.preadv(descriptor, [entries], address // mmap.PAGESIZE * _ENTRY) != len(entries):
            return True
    except OSError:
        return True
    finally:
        os.close(descriptor)
    # Without torch: this may run while the interpreter ends.
    kinds = set(entries[_ENTRY - 1 :: _ENTRY])
    return any(kind & _SWAPPED or (kind & _PRESENT and not kind & _FILE) for kind in kinds)
