"""What travels beside a request through vLLM's app: tokens on the way in, the engine's output back."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..failures import GenerationError
from ..protocol import Completion
from ..server.pinning import PinnedRequest
from ..server.splice import CarriedTokens


@dataclass(slots=True)
class Exchange:
    """One request.

    Attributes:
        carried: the tokens that its messages bring along, if any.
        pinned: how it is sampled; ``None`` where nothing is.
        prompt: its tokens, once rendered.
        completion: what was sampled, once it was.
        failure: why it was not.
    """

    carried: CarriedTokens | None
    pinned: PinnedRequest | None
    prompt: tuple[int, ...] = ()
    completion: Completion | None = None
    failure: GenerationError | None = None


CURRENT: ContextVar[Exchange | None] = ContextVar("rl_generation_exchange", default=None)
"""Of the request that is being served; ``None`` for what does not come through our contract."""

Complete = Callable[[Any], Completion]
"""From vLLM's finished ``RequestOutput`` to a completion."""
