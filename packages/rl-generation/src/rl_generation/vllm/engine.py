"""One vLLM engine for whoever is in this process: blocking calls, and calls for any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ..failures import DeadlineError, GenerationError, NotReadyError
from ..fleet.replica import ReplicaFacts
from ..fleet.threads import LoopThread
from ..protocol import Completion, GenerationRequest, RefitSpec
from ..refit.contract import Bucket, RefitAck
from ..refit.manifest import spec_of_tensors
from ..refit.publisher import TensorSource
from .core import EngineCore
from .driver import Driver
from .environment import is_cpu_build, prepare_environment
from .kv_cache import cache_fault, cache_shape
from .offered import require_known
from .prompt_scores import PromptScores
from .settings import VllmSettings

T = TypeVar("T")

_SLACK_S = 10.0
_ENDING_S = 30.0


class VllmEngine:
    """vLLM's asynchronous engine, in a process of its own, driven from a thread of this object's own.

    Implements :class:`~rl_generation.protocol.Generation` for callers that block, and the methods of
    :class:`~rl_generation.refit.contract.RefitTarget` and those ending in ``_async`` for callers on any event
    loop. vLLM is imported by :meth:`start`, never before.

    Args:
        settings: of the engine.

    Example:
        >>> engine = VllmEngine(VllmSettings("path/to/model"))
        >>> engine.start()
        >>> engine.generate([GenerationRequest((1, 2, 3), SamplingParams(max_new_tokens=8))])
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._thread: LoopThread | None = None
        self._core: EngineCore | None = None
        self._announced: RefitSpec | None = None
        self._closed = False
        self._starting = False

    @property
    def base_urls(self) -> list[str]:
        """``[]``: the engine alone serves no HTTP."""
        return []

    @property
    def name(self) -> str:
        """Stands in every error and log line."""
        return self._settings.name

    @property
    def started(self) -> bool:
        """Whether there is an engine, alive or dead."""
        return self._core is not None

    @property
    def weight_version(self) -> int:
        """Of the last weights that were whole."""
        return self._settings.weight_version if self._core is None else self._core.weight_version

    def start(self, *, stale: bool = False) -> ReplicaFacts:
        """Load the checkpoint; again after a death or :meth:`shutdown`.

        Args:
            stale: nothing is sampled before a refit completes.

        Raises:
            UnavailableBackendError: vLLM is not installed here.
            GenerationError: the settings do not fit the checkpoint or the machine.
            InfraError: the engine's process ended while it started, or was not up in time.
        """
        return self._block(lambda: self.start_async(stale=stale), self._settings.start_timeout_s + _ENDING_S)

    async def start_async(self, *, stale: bool = False) -> ReplicaFacts:
        """As :meth:`start`."""
        if self._core is not None:
            await self.shutdown_async(self._settings.control_timeout_s)
        cpu = is_cpu_build()
        self._require_possible(cpu)
        prepare_environment(self._settings, cpu=cpu)
        self._thread = LoopThread(self._settings.name)
        self._core = core = EngineCore(self._settings, self._make_driver(cpu))
        self._closed, self._starting = False, True
        try:
            return await self._on_loop(core.start(stale=stale))
        except BaseException:
            await self.shutdown_async(self._settings.control_timeout_s)
            raise
        finally:
            self._starting = False

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests; see :meth:`EngineCore.generate` for what it raises."""
        return self._block(lambda: self.generate_all_async(requests), self._settings.request_timeout_s)

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion. Cancelling ends the request inside the engine."""
        (completion,) = await self.generate_all_async([request])
        return completion

    async def generate_all_async(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """As :meth:`generate`."""
        return await self._on_loop(self._running().generate(list(requests)))

    async def score_async(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Natural-log probability of each token but the first at temperature 1; never of a cached prefix."""
        return (await self._on_loop(self._running().score(tuple(token_ids)))).logprobs

    async def score_all_async(self, sequences: Sequence[Sequence[int]], top: int) -> list[PromptScores]:
        """Of each sequence its tokens' log-probabilities at temperature 1, and the ``top`` likeliest tokens.

        ``top`` may be at most the engine's argument ``max_logprobs``.

        Raises:
            GenerationError: see :meth:`EngineCore.score`.
        """
        core = self._running()

        async def every() -> list[PromptScores]:
            return list(await asyncio.gather(*(core.score(tuple(ids), top) for ids in sequences)))

        return await self._on_loop(every())

    def score_all(self, sequences: Sequence[Sequence[int]], top: int) -> list[PromptScores]:
        """As :meth:`score_all_async`."""
        return self._block(lambda: self.score_all_async(sequences, top), self._settings.request_timeout_s)

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """As :meth:`score_async`."""
        return self._block(lambda: self.score_async(token_ids), self._settings.request_timeout_s)

    async def probe(self) -> None:
        """Sample one token for real; raises if that fails."""
        await self._on_loop(self._running().probe())

    def prepare_refit(self, spec: RefitSpec) -> None:
        """Check that the announced tensors fit this engine before any weight moves.

        Raises:
            RefitError: they do not; names the tensor.
        """
        self._running().require_fit(spec)
        self._announced = spec

    def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights through shared memory; requests in flight go on with them.

        Without :meth:`prepare_refit` the whole stream is held in memory to announce it.

        Args:
            stream: names in HF layout and tensors.
            version: larger than the present one.

        Raises:
            RefitError: the stream does not fit, in which case the old weights go on, or it failed half way,
                in which case the engine is stale.
        """
        spec, self._announced = self._announced, None
        if spec is None:
            stream = list(stream)
            spec = spec_of_tensors(stream)
        source = TensorSource(
            lambda: spec.tensors, lambda: stream, self._settings.transport, name=f"{self.name}: policy"
        )
        deadline = self._settings.refit_timeout_s
        try:
            announced = source.begin("shared_memory")
            self._block(lambda: self.begin_refit(announced, version), deadline)
            try:
                while (bucket := source.next_bucket()) is not None:
                    self._block(lambda bucket=bucket: self.load_bucket(bucket), deadline)
                self._block(self.finish_refit, deadline)
            except BaseException:
                self._block(self.abort_refit, deadline)
                raise
        finally:
            source.end()

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._on_loop(self._running().begin_refit(spec, version))

    async def load_bucket(self, bucket: Bucket) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._on_loop(self._running().load_bucket(bucket))

    async def finish_refit(self) -> RefitAck:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        return await self._on_loop(self._running().finish_refit())

    async def abort_refit(self) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._on_loop(self._running().abort_refit())

    def pause(self) -> None:
        """Stop admitting and decoding; requests keep what they have."""
        self._block(self.pause_async, self._settings.control_timeout_s)

    async def pause_async(self) -> None:
        """As :meth:`pause`."""
        await self._on_loop(self._running().pause())

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._block(self.resume_async, self._settings.control_timeout_s)

    async def resume_async(self) -> None:
        """As :meth:`resume`."""
        await self._on_loop(self._running().resume())

    def sleep(self) -> None:
        """Give memory back; refused while requests are in flight."""
        self._block(self.sleep_async, self._settings.control_timeout_s)

    async def sleep_async(self) -> None:
        """As :meth:`sleep`."""
        await self._on_loop(self._running().sleep())

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self._block(self.wake_async, self._settings.control_timeout_s)

    async def wake_async(self) -> None:
        """As :meth:`wake`."""
        await self._on_loop(self._running().wake())

    def health(self) -> dict[str, Any]:
        """Facts about the engine's state; asks no process."""
        return self._block(self.health_async, self._settings.control_timeout_s)

    async def health_async(self) -> dict[str, Any]:
        """As :meth:`health`."""
        if self._core is None or self._starting:
            # vLLM's start keeps the loop busy.
            state = "starting" if self._starting else "closed" if self._closed else "new"
            return {"name": self.name, "state": state, "weight_version": self.weight_version}
        return await self._on_loop(self._core.health())

    def shutdown(self, timeout_s: float) -> None:
        """End all processes; idempotent, returns within ``timeout_s`` or a little more."""
        self._block(lambda: self.shutdown_async(timeout_s), timeout_s + _SLACK_S)

    async def shutdown_async(self, timeout_s: float) -> None:
        """As :meth:`shutdown`."""
        core, thread = self._core, self._thread
        self._closed = True
        if core is None or thread is None:
            return
        await self._on_loop(core.shutdown(timeout_s))
        # The thread last: the kernel ends the engine's processes with it.
        self._core, self._thread = None, None
        await asyncio.to_thread(thread.close, timeout_s)

    async def on_engine_loop(self, work: Callable[[EngineCore], Coroutine[Any, Any, T]]) -> T:
        """Run something on the loop that vLLM's client belongs to, such as an HTTP server.

        Raises:
            NotReadyError: the engine was not started.
        """
        return await self._on_loop(work(self._running()))

    def _require_possible(self, cpu: bool) -> None:
        settings = self._settings
        require_known(self.name, settings.engine_arguments, None)
        fault = cache_fault(settings, cache_shape(settings.model_dir), cpu=cpu)
        if fault is not None:
            raise GenerationError(f"{self.name}: kv_cache_bytes: {fault}")

    def _make_driver(self, cpu: bool) -> Driver:
        # Here and not at the top: it takes vLLM's names when it is used.
        from .async_driver import AsyncDriver

        return AsyncDriver(self._settings, cpu=cpu)

    def _running(self) -> EngineCore:
        if self._core is None:
            if self._closed:
                raise GenerationError(f"{self.name}: used after shutdown(); build a new engine")
            raise NotReadyError(f"{self.name}: not started yet; call start() first")
        return self._core

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            work.close()
            raise NotReadyError(f"{self.name}: not started yet; call start() first")
        return await asyncio.wrap_future(self._thread.submit(work))

    def _block(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        async def bounded() -> T:
            try:
                # Every call has a deadline of its own, whose error says more.
                async with asyncio.timeout(timeout_s + _SLACK_S):
                    return await work()
            except TimeoutError as error:
                raise DeadlineError(f"{self.name}: no answer within {timeout_s + _SLACK_S:g} s") from error

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(bounded())
        raise GenerationError(
            f"{self.name}: a blocking call on an event loop; await the one ending in _async"
        )
