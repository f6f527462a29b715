"""Memory of a run's processes: how much one has needed, and in pages of which size it comes."""

from __future__ import annotations

import os
import resource

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def peak_memory_mb() -> float:
    """Largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def huge_page_variables() -> dict[str, str]:
    """Environment of a process that computes: its large allocations lie in huge pages.

    A weight matrix in pages of 4 KiB has more pages than a core can remember the place of, which alone
    makes matrix products up to twice as slow. Linux gives huge pages to those who ask (``madvise``), and
    glibc asks (since 2.35, see "Memory Allocation Tunables" in its manual) if it is told so before the
    process starts. Elsewhere the variable has no effect. What a user has chosen is kept.
    """
    chosen = [item for item in os.environ.get(_TUNABLES, "").split(":") if item]
    if any(item.partition("=")[0] == _HUGE_PAGES for item in chosen):
        return {}
    return {_TUNABLES: ":".join([*chosen, f"{_HUGE_PAGES}=1"])}
