"""What holds of one engine now, and calls to it that end with its answer, its death or a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..failures import EngineDeadError, GenerationError, NotReadyError, RefitError, StaleWeightsError
from .driver import Driver, Launched
from .settings import VllmSettings
from .trouble import Trouble, guarded
from .weights import WeightAccount

T = TypeVar("T")


class EngineState:
    """The facts that decide what an engine may do. All on one event loop.

    Args:
        settings: of the engine.
        driver: vLLM's.
    """

    def __init__(self, settings: VllmSettings, driver: Driver) -> None:
        self._settings = settings
        self._name = settings.name
        self._driver = driver
        self._facts: Launched | None = None
        self._weights = WeightAccount(settings)
        self._dead = Trouble()
        self._stale = Trouble()
        self._paused = False
        self._asleep = False
        self._closed = False
        self._control = asyncio.Lock()
        self._listeners: list[Callable[[GenerationError | None], None]] = []

    @property
    def weight_version(self) -> int:
        """Of the last weights that were whole."""
        return self._weights.version

    @property
    def client(self) -> Any:
        """vLLM's own engine, for an HTTP server on this loop."""
        return self._driver.engine

    def listen(self, listener: Callable[[GenerationError | None], None]) -> None:
        """Have ``listener`` told why nothing can be served any more, or ``None`` when it can again."""
        self._listeners.append(listener)

    def refusal(self) -> GenerationError | None:
        """Why nothing is served now, ``None`` if it is."""
        if self._facts is None and not self._closed:
            return NotReadyError(f"{self._name}: the engine still loads")
        for trouble in (self._dead, self._stale):
            if trouble.here:
                return trouble.error()
        if self._asleep:
            return NotReadyError(f"{self._name}: asleep; call wake() before generating")
        return None

    def _state(self) -> str:
        if self._closed:
            return "closed"
        if self._facts is None:
            return "starting"
        if self._dead.here:
            return "dead"
        if self._weights.arriving:
            return "refitting"
        if self._stale.here:
            return "stale"
        if self._asleep:
            return "asleep"
        return "paused" if self._paused else "running"

    def _require_started(self) -> Launched:
        self._dead.raise_if_here()
        if self._facts is None:
            raise NotReadyError(f"{self._name}: not started yet; call start() first")
        return self._facts

    def _require_awake(self, action: str) -> None:
        self._require_started()
        self._stale.raise_if_here()
        if self._asleep:
            raise GenerationError(f"{self._name}: asleep; call wake() before {action}")

    def _died(self, reason: str) -> None:
        self._dead.report(EngineDeadError, f"{self._name}: {reason}; start it again")
        self._tell()

    def _grow_stale(self, reason: str) -> None:
        self._stale.clear()
        self._stale.report(
            StaleWeightsError, f"{self._name}: {reason}; nothing is sampled before a refit completes"
        )
        self._tell()

    async def _hold(self) -> None:
        await self._within(self._driver.hold(), "a pause", self._settings.control_timeout_s)

    async def _release(self) -> None:
        if not self._paused and not self._asleep and not self._weights.arriving and not self._dead.here:
            await self._within(self._driver.let_go(), "resuming", self._settings.control_timeout_s)

    async def _let_go_anyway(self) -> None:
        """Where something failed already that says more."""
        with contextlib.suppress(GenerationError):
            await self._release()

    async def _workers(self, method: str, *arguments: Any, calls: int = 1) -> list[Any]:
        """Call every worker, behind as many calls as ``calls`` says with this one."""
        what = method.removeprefix("rl_").replace("_", " ")
        return await self._refitting(self._driver.call_workers(method, *arguments), what, calls)

    async def _refitting(self, work: Coroutine[Any, Any, T], what: str, calls: int = 1) -> T:
        """One step of a refit: whatever goes wrong is of the refit, except for a death."""
        try:
            return await self._within(work, what, calls * self._settings.refit_timeout_s)
        except GenerationError as error:
            if isinstance(error, EngineDeadError):
                raise
            raise RefitError(str(error)) from error

    async def _within(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        return await guarded(work, (self._dead,), component=self._name, what=what, timeout_s=timeout_s)

    def _tell(self) -> None:
        reason = self.refusal()
        for listener in self._listeners:
            listener(reason)
