"""The worker on CPUs."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from .refit_worker import TakesWeights
from .weight_loading import keep_weights_live


class RefitWorker(TakesWeights, CPUWorker):
    """vLLM's worker, which keeps its weights where a refit can write to them."""

    def load_model(self, **arguments: bool) -> None:
        """Load the checkpoint without packing linear weights."""
        keep_weights_live()
        super().load_model(**arguments)
