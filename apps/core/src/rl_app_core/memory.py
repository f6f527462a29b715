"""How much memory a process has needed."""

from __future__ import annotations

import resource


def peak_memory_mb() -> float:
    """Largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
