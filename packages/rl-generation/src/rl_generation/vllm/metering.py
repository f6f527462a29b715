"""Counts sampled tokens while they are sampled."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class TokenMeter:
    """Reads vLLM's statistics of each step.

    Attributes:
        sampled_tokens: since the start, over all requests.
    """

    def __init__(self) -> None:
        self.sampled_tokens = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """What vLLM wants to be given: something that makes a logger."""
        return _Logger(self)


class _Logger(StatLoggerBase):
    def __init__(self, meter: TokenMeter) -> None:
        self._meter = meter

    def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
        if iteration_stats is not None:
            self._meter.sampled_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""
