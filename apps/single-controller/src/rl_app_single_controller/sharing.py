"""The run's engine for rollouts that come and go at any time, from any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Protocol

from rl_app_core.rollout_engine import ColocatedEngine, RolloutEngine
from rl_generation.batching import RequestBatcher
from rl_generation.protocol import Completion, GenerationRequest
from rl_policy_megatron.errors import RankError

_GATHER_S, _QUIET_S = 0.1, 0.005


class SharedEngine(Protocol):
    """What rollouts sample from, as they come."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        ...

    def check(self) -> None:
        """Raise what says that it will never answer again, if that has happened."""
        ...


class _Direct:
    """An engine that takes requests while it works on others. One that is the policy may be lost for good."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._lost: RankError | None = None

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`SharedEngine`."""
        try:
            return self._engine.sample(requests)
        except RankError as error:
            # The first one has the cause; the others say only that there was one.
            self._lost = self._lost or error
            raise

    def check(self) -> None:
        """See :class:`SharedEngine`."""
        if self._lost is not None:
            raise self._lost


class _Batched:
    """What arrives while a batch is sampled forms the next one."""

    def __init__(self, direct: _Direct, timeout_s: float) -> None:
        # A small batch costs about what a large one does, and rows that begin together come one by one.
        self._batcher = RequestBatcher(direct, timeout_s=timeout_s, gather_s=_GATHER_S, quiet_s=_QUIET_S)
        self.check = direct.check
        self.close = self._batcher.close

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`SharedEngine`."""
        return self._batcher.generate(requests)


@contextlib.contextmanager
def shared_engine(engine: RolloutEngine, *, timeout_s: float) -> Generator[SharedEngine]:
    """``engine`` without its habit of fetching new weights before it samples: they come when published.

    Args:
        engine: of the run.
        timeout_s: the longest that a request may wait for its answer.
    """
    direct = _Direct(engine)
    if not isinstance(engine, ColocatedEngine):
        yield direct
        return
    batched = _Batched(direct, timeout_s)
    try:
        yield batched
    finally:
        batched.close(timeout_s=1.0)
