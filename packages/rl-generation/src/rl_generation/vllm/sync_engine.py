"""vLLM's synchronous engine in this very process."""

from __future__ import annotations

from .driver import Driver
from .engine import VllmEngine


class VllmSyncEngine(VllmEngine):
    """As :class:`VllmEngine`, without a process of its own: one batch at a time, which nothing interrupts.

    For scripts and single batches. vLLM changes this process for good, such as its number of threads; a death
    of the engine is one of this process.
    """

    def _make_driver(self, cpu: bool) -> Driver:
        from .sync_driver import SyncDriver

        return SyncDriver(self._settings, cpu=cpu)
