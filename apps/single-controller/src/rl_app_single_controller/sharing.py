"""The run's engine for rollouts that come and go at any time, from any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Protocol

from rl_app_core.chat_model import TokenEngine
from rl_app_core.rollout_engine import ColocatedEngine, RolloutEngine
from rl_generation.batching import RequestBatcher
from rl_generation.protocol import Completion, GenerationRequest


class _Sampling(Protocol):
    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]: ...


class _Direct:
    """An engine that takes requests while it works on others."""

    def __init__(self, engine: _Sampling) -> None:
        self._engine = engine

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        return self._engine.sample(requests)


@contextlib.contextmanager
def shared_engine(engine: RolloutEngine, *, timeout_s: float) -> Generator[TokenEngine]:
    """``engine`` without its habit of fetching new weights before it samples: they come when published.

    Where it does one batch at a time, what arrives meanwhile forms the next batch.

    Args:
        engine: of the run.
        timeout_s: the longest that a request may wait for its answer.
    """
    direct = _Direct(engine)
    if not isinstance(engine, ColocatedEngine):
        yield direct
        return
    batcher = RequestBatcher(direct, timeout_s=timeout_s)
    try:
        yield batcher
    finally:
        batcher.close(timeout_s=1.0)
