"""A front for engines that generate in batches, one at a time: requests that arrive together run together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from .failures import DeadlineError, GenerationError, InfraError
from .protocol import Completion, GenerationRequest

_COMPONENT = "request batcher"


class BatchEngine(Protocol):
    """The one method of an engine that batching needs."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests; blocks."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: GenerationRequest
    answer: Future[Completion]
    deadline: float


class RequestBatcher:
    """Collects single requests into batches: those that arrive while one batch runs form the next.

    Usable from any number of event loops and threads. A request that the engine refuses fails alone: the
    batch is halved until it is found. Call :meth:`close` in the end.

    Args:
        engine: generates, from a thread of this object's own.
        max_batch: the most requests that are handed over at once.
        timeout_s: the longest that a request may take from its arrival.
        gather_s: how long a batch waits for company once its first request is there.
        quiet_s: it waits no longer than until nobody has come for so long; ``None`` waits ``gather_s`` out.

    Raises:
        ValueError: a limit that is none.
    """

    def __init__(
        self,
        engine: BatchEngine,
        *,
        max_batch: int = 256,
        timeout_s: float = 600.0,
        gather_s: float = 0.002,
        quiet_s: float | None = None,
    ) -> None:
        if max_batch < 1 or timeout_s <= 0 or gather_s < 0:
            raise ValueError(
                f"max_batch must be at least 1, timeout_s above 0 and gather_s at least 0, got {max_batch}, "
                f"{timeout_s:g} and {gather_s:g}"
            )
        if quiet_s is not None and not 0 < quiet_s <= gather_s:
            raise ValueError(f"quiet_s must lie in (0, gather_s = {gather_s:g}], or be None; got {quiet_s:g}")
        self._engine = engine
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        self._gather_s = gather_s
        self._quiet_s = gather_s if quiet_s is None else quiet_s
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._batches = 0
        self._thread = threading.Thread(target=self._work, name="rl-generation-batcher", daemon=True)
        self._thread.start()

    @property
    def batches(self) -> int:
        """How many times the engine was called."""
        return self._batches

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion. Cancelling the call takes the request back if it is still waiting.

        Raises:
            GenerationError: what the engine raised for this request.
            DeadlineError: no answer within ``timeout_s``.
            InfraError: the batcher is closed.
        """
        answer = self._submit(request)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), self._timeout_s)
        except TimeoutError as error:
            answer.cancel()
            raise self._late(request) from error

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, for callers in threads of their own.

        Raises:
            GenerationError: what the engine raised for the first request that failed.
            DeadlineError: not all was answered within ``timeout_s``.
            InfraError: the batcher is closed.
        """
        deadline = time.monotonic() + self._timeout_s
        answers = [self._submit(request) for request in requests]
        try:
            return [answer.result(max(0.0, deadline - time.monotonic())) for answer in answers]
        except TimeoutError as error:
            raise self._late(requests[0]) from error
        finally:
            for answer in answers:
                answer.cancel()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Fail what is waiting and end; idempotent.

        Returns:
            Whether the batch in flight ended within ``timeout_s``.
        """
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for waiting in left:
            _fail(waiting, InfraError(f"{_COMPONENT}: closed before the request began"))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, request: GenerationRequest) -> Future[Completion]:
        waiting = _Waiting(request, Future(), time.monotonic() + self._timeout_s)
        with self._changed:
            if self._closed:
                raise InfraError(f"{_COMPONENT}: used after close(); build a new one")
            self._waiting.append(waiting)
            self._changed.notify_all()
        return waiting.answer

    def _work(self) -> None:
        while batch := self._next_batch():
            self._run(batch)

    def _next_batch(self) -> list[_Waiting]:
        """Blocks until something waits; empty once closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return []
                self._gather()
                if self._closed:
                    return []
                batch: list[_Waiting] = []
                while self._waiting and len(batch) < self._max_batch:
                    waiting = self._waiting.popleft()
                    if time.monotonic() >= waiting.deadline:
                        _fail(waiting, self._late(waiting.request))
                    elif waiting.answer.set_running_or_notify_cancel():
                        batch.append(waiting)
                if batch:
                    return batch

    def _gather(self) -> None:
        """Wait for company: until the batch is full, nobody comes any more, or ``gather_s`` has passed."""
        until = time.monotonic() + self._gather_s
        while not self._closed and len(self._waiting) < self._max_batch:
            count = len(self._waiting)
            left = min(self._quiet_s, until - time.monotonic())
            if left <= 0 or not self._changed.wait_for(
                lambda count=count: len(self._waiting) > count or self._closed, left
            ):
                return

    def _run(self, batch: list[_Waiting]) -> None:
        self._batches += 1
        try:
            completions = self._engine.generate([waiting.request for waiting in batch])
            if len(completions) != len(batch):
                raise InfraError(
                    f"{_COMPONENT}: the engine gave {len(completions)} completions for {len(batch)} requests"
                )
        except Exception as error:
            at_fault = isinstance(error, GenerationError) and error.kind == "data"
            if at_fault and len(batch) > 1 and not self._closed:
                half = len(batch) // 2
                self._run(batch[:half])
                self._run(batch[half:])
                return
            for waiting in batch:
                waiting.answer.set_exception(error)
            return
        for waiting, completion in zip(batch, completions, strict=True):
            waiting.answer.set_result(completion)

    def _late(self, request: GenerationRequest) -> DeadlineError:
        name = f"request {request.request_id!r}" if request.request_id else "a request"
        return DeadlineError(
            f"{_COMPONENT}: {name} had no answer within {self._timeout_s:g} s; send fewer requests at a "
            "time or raise timeout_s"
        )


def _fail(waiting: _Waiting, error: GenerationError) -> None:
    if waiting.answer.set_running_or_notify_cancel():
        waiting.answer.set_exception(error)
