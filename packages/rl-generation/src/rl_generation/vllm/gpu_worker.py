"""The worker on GPUs."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from .refit_worker import TakesWeights


class RefitWorker(TakesWeights, Worker):
    """vLLM's worker, which can take new weights."""
