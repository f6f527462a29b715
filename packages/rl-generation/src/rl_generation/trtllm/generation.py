"""The engine for callers without an event loop: the same, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..failures import GenerationError
from ..fleet.threads import LoopThread
from ..protocol import Completion, GenerationRequest, RefitSpec
from ..refit.contract import TransportName
from ..refit.publisher import TensorSource
from ..refit.settings import TransportSettings
from .availability import require_available
from .engine import TrtllmEngine
from .settings import TrtllmSettings


class TrtllmGeneration:
    """A :class:`~rl_generation.protocol.Generation` of one engine, started when it is built.

    Args:
        settings: of the engine.
        transport: how the bytes of a refit get to the workers.
        transport_settings: of that.
        check: says what is missing on this machine before anything is imported.

    Raises:
        UnavailableBackendError: the package, its libraries or a GPU is missing.
        GenerationError: the engine did not start.
    """

    def __init__(
        self,
        settings: TrtllmSettings,
        *,
        transport: TransportName = "cuda_ipc",
        transport_settings: TransportSettings | None = None,
        check: Callable[[], None] = require_available,
    ) -> None:
        # Before a thread exists that would have to be ended again.
        check()
        self._settings = settings
        self._transport: TransportName = transport
        self._transport_settings = transport_settings or TransportSettings()
        self._spec: RefitSpec | None = None
        self._engine = TrtllmEngine(settings, self._transport_settings, check=check)
        self._loop = LoopThread(settings.name)
        try:
            self._call(self._engine.start(), "start", settings.start_timeout_s)
        except BaseException:
            self._loop.close(settings.probe_timeout_s)
            raise

    @property
    def base_urls(self) -> list[str]:
        """Always ``[]``: this engine serves no HTTP."""
        return []

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        return self._engine.weight_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests; raises what :meth:`TrtllmEngine.generate` raises."""
        settings = self._settings
        limit = settings.request_timeout_s + 2 * settings.pause_timeout_s
        return self._call(self._engine.generate(requests), "generate", limit)

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion, awaited on the caller's loop."""
        return await asyncio.wrap_future(self._loop.submit(self._engine.generate_async(request)))

    def prepare_refit(self, spec: RefitSpec) -> None:
        """Check that the announced tensors fit the checkpoint.

        Raises:
            RefitError: they do not; nothing has moved.
        """
        self._engine.check_refit(spec)
        self._spec = spec

    def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Move the tensors that :meth:`prepare_refit` announced into the workers.

        Raises:
            GenerationError: nothing was announced.
            RefitError: the stream is not what was announced, or did not arrive; the engine is stale if a
                weight moved.
        """
        spec = self._spec
        if spec is None:
            raise GenerationError(
                f"{self._settings.name}: update_weights without an announcement; call prepare_refit first"
            )
        source = TensorSource(
            lambda: spec.tensors, lambda: stream, self._transport_settings, self._settings.name
        )
        settings = self._settings
        announced = source.begin(self._transport)
        try:
            self._call(
                self._engine.begin_refit(announced, version), "begin a refit", 2 * settings.pause_timeout_s
            )
            try:
                while (bucket := source.next_bucket()) is not None:
                    self._call(
                        self._engine.load_bucket(bucket), "load a bucket", 2 * settings.refit_timeout_s
                    )
                self._call(self._engine.finish_refit(), "finish a refit", 2 * settings.refit_timeout_s)
            except BaseException:
                self._call(self._engine.abort_refit(), "abort a refit", settings.probe_timeout_s)
                raise
        finally:
            source.end()

    def pause(self) -> None:
        """Stop sampling; requests in flight keep what they have."""
        self._call(self._engine.pause(), "pause", 2 * self._settings.pause_timeout_s)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._call(self._engine.resume(), "resume", self._settings.probe_timeout_s)

    def sleep(self) -> None:
        """Give the GPUs' memory back."""
        limit = 2 * (self._settings.pause_timeout_s + self._settings.memory_timeout_s)
        self._call(self._engine.sleep(), "sleep", limit)

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self._call(self._engine.wake(), "wake", 2 * self._settings.memory_timeout_s)

    def health(self) -> dict[str, Any]:
        """State, version and counts; answers in every state."""
        if self._loop.closed:
            return {"backend": "trtllm", "state": "closed", "weight_version": self.weight_version}
        return self._call(self._engine.health(), "health", self._settings.probe_timeout_s)

    def shutdown(self, timeout_s: float) -> None:
        """End the workers and the thread; idempotent."""
        if self._loop.closed:
            return
        try:
            self._call(self._engine.shutdown(timeout_s), "shutdown", timeout_s)
        finally:
            self._loop.close(timeout_s)

    def _call(self, work: Any, what: str, timeout_s: float) -> Any:
        return self._loop.call(work, what, timeout_s)
