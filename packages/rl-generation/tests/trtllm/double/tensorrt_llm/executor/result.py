"""Double of ``tensorrt_llm.executor.result``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """Of one candidate."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    """The handle of a request. Made by ``AsyncLLM`` only, on an event loop."""

    def __init__(self, prompt: tuple[int, ...], params: Any) -> None:
        self.prompt_token_ids = prompt
        self.params = params
        self.outputs = [CompletionOutput(0)]
        self.cached_tokens = 0
        self.is_aborted = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def aresult(self) -> RequestOutput:
        """Wait for the end."""
        await asyncio.shield(self.done)
        return self

    def abort(self) -> None:
        """May be called from any thread."""
        self.is_aborted = True
