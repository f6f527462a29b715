"""One TensorRT-LLM engine on an event loop: tokens in, tokens with their log-probabilities out."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..failures import (
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    NotReadyError,
    RefitError,
    RequestError,
    StaleWeightsError,
)
from ..fleet.replica import ReplicaFacts
from ..protocol import Completion, GenerationRequest, RefitSpec, SamplingParams
from ..refit.contract import Bucket, RefitAck
from ..refit.settings import TransportSettings
from .admission import Flight
from .answers import Answer
from .api import TrtllmApi
from .availability import require_available
from .faults import classified
from .launch import end, launch
from .model_files import model_facts
from .pausing import Pauses
from .refit import WeightLoader
from .sampler import Sampler
from .sampling_arguments import is_scorable, model_opinions
from .settings import TrtllmSettings

_PAUSE, _REFIT, _SLEEP = "a pause", "a refit", "a sleep"
_PROBE = GenerationRequest((0,), SamplingParams(max_new_tokens=1, temperature=0.0), "probe")


class TrtllmEngine:
    """An engine whose workers are Ray actors of TensorRT-LLM's own, which end with the process of this.

    Every call belongs to the event loop that :meth:`start` ran on. A pause, a refit or a sleep makes the
    workers give back the requests in flight with what they have; afterwards each goes on from there, so a
    completion can hold tokens of several weight versions.

    Args:
        settings: of the engine.
        transport: of the policy's side of refits.
        check: says what is missing on this machine before anything is imported.
    """

    def __init__(
        self,
        settings: TrtllmSettings,
        transport: TransportSettings | None = None,
        *,
        check: Callable[[], None] = require_available,
    ) -> None:
        self._settings = settings
        self._transport = transport or TransportSettings()
        self._check = check
        self._name = settings.name
        self._folder = Path(settings.model)
        self._flight = Flight(self._name)
        self._pauses = Pauses(self._name, self._flight, settings.pause_timeout_s)
        self._llm: Any = None
        self._api: TrtllmApi | None = None
        self._weights: WeightLoader | None = None
        self._sampler: Sampler | None = None
        self._closed = False
        self._requests_done = 0

    @property
    def base_urls(self) -> list[str]:
        """Always ``[]``: the server is the worker's."""
        return []

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        version = self._weights.version if self._weights is not None else None
        return self._settings.weight_version if version is None else version

    @property
    def stale(self) -> bool:
        """Whether nothing may be sampled before a refit completes."""
        return self._weights is not None and self._weights.stale

    def can_score(self, sampling: SamplingParams) -> bool:
        """Whether the release reports log-probabilities of the distribution that these settings sample from.

        Raises:
            NotReadyError: not started.
        """
        return is_scorable(sampling, self._require_api())

    async def start(self, *, stale: bool = False) -> ReplicaFacts:
        """Look at the machine, import TensorRT-LLM, start its workers and load the checkpoint.

        Args:
            stale: sample nothing before a refit completes.

        Raises:
            UnavailableBackendError: the package, its libraries or a GPU is missing.
            DeadlineError: not ready within ``start_timeout_s``.
            GenerationError: the model or an argument is unsuitable.
        """
        if self._closed or self._llm is not None:
            raise GenerationError(f"{self._name}: an engine starts once; build a new one")
        self._check()
        settings = self._settings
        facts = model_facts(self._folder)
        if facts.longest_context is not None and settings.max_context > facts.longest_context:
            raise RequestError(
                f"{self._name}: max_context {settings.max_context} is more than the {facts.longest_context} "
                "positions that the model knows; lower it"
            )
        launched = await launch(settings)
        llm, api = launched.llm, launched.api
        self._llm, self._api = llm, api
        self._pauses.attach(llm, stops_itself=api.pauses)
        self._sampler = Sampler(
            llm,
            api,
            settings,
            flight=self._flight,
            vocab_size=facts.vocab_size,
            neutral=model_opinions(self._folder),
        )
        unfit = stale or settings.load_format == "dummy"
        self._weights = WeightLoader(
            llm,
            devices=launched.devices,
            folder=self._folder,
            head_is_tied=facts.head_is_tied,
            component=self._name,
            version=None if unfit else settings.weight_version,
            transport=self._transport,
            timeout_s=settings.refit_timeout_s,
        )
        return ReplicaFacts(settings.max_context, facts.vocab_size, settings.weight_version, os.getpid())

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, sampled at the same time.

        Raises:
            RequestError: a request does not fit; nothing has run then.
            StaleWeightsError: the weights are old or a mixture.
            EngineDeadError: a worker is gone, or the engine was shut down.
            DeadlineError: a request took, or waited, too long.
        """
        sampler = self._ready()
        limits = [sampler.room_for(request) for request in requests]
        tasks = [
            asyncio.ensure_future(self._complete(request, limit, sampler))
            for request, limit in zip(requests, limits, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion; raises what :meth:`generate` raises."""
        return (await self.generate([request]))[0]

    async def probe(self) -> None:
        """Sample one token; while nothing may be sampled, ask every worker for a sign of life.

        Raises:
            GenerationError: that failed, or took longer than ``probe_timeout_s``.
        """
        timeout_s = self._settings.probe_timeout_s
        sampler = self._ready()
        with classified(self._name, "answer a probe"):
            try:
                async with asyncio.timeout(timeout_s):
                    if self._pauses.reasons or self._loader.stale:
                        await self._llm.collective_rpc("report_device_id")
                    else:
                        await sampler.sample(_PROBE, (), 1)
            except TimeoutError as error:
                raise DeadlineError(f"{self._name}: no answer to a probe within {timeout_s:g} s") from error

    async def pause(self) -> None:
        """Stop sampling; requests in flight keep what they have.

        Raises:
            DeadlineError: some did not stop within ``pause_timeout_s``.
        """
        self._ready()
        await self._pauses.hold(_PAUSE)

    async def resume(self) -> None:
        """Undo :meth:`pause`."""
        await self._pauses.release(_PAUSE)

    async def sleep(self) -> None:
        """Give the GPUs' memory back; requests wait for :meth:`wake`.

        Raises:
            GenerationError: the engine was not built for it, or a refit is running.
        """
        api = self._require_api()
        if not self._settings.can_sleep or not api.sleep_arguments:
            raise GenerationError(
                f"{self._name}: was not built to give memory back; set can_sleep (TensorRT-LLM {api.version})"
            )
        if self._loader.running:
            raise GenerationError(f"{self._name}: cannot sleep during a refit; finish or abort it first")
        if _SLEEP in self._pauses.reasons:
            return
        await self._pauses.hold(_SLEEP)
        async with self._memory_deadline("sleep"):
            if api.empties_prefix_cache:
                await self._llm.collective_rpc("reset_prefix_cache")
            await self._llm.release(list(api.memory_tags))

    async def wake(self) -> None:
        """Undo :meth:`sleep`; idempotent."""
        if _SLEEP not in self._pauses.reasons:
            return
        async with self._memory_deadline("wake"):
            await self._llm.resume(list(self._require_api().memory_tags))
        await self._pauses.release(_SLEEP)

    def check_refit(self, spec: RefitSpec) -> None:
        """Compare an announcement with the checkpoint before any weight moves.

        Raises:
            RefitError: it does not fit.
        """
        self._loader.check(spec)

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        """Compare the announcement with the checkpoint, then stop sampling.

        Raises:
            RefitError: it does not fit, or the version does not grow; the engine goes on as before.
            DeadlineError: requests in flight did not stop.
        """
        loader = self._loader
        if _SLEEP in self._pauses.reasons:
            raise RefitError(f"{self._name}: asleep; call wake() before a refit")
        loader.begin(spec, version)
        try:
            await self._pauses.hold(_REFIT)
        except BaseException:
            loader.abort()
            raise

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load the tensors of one bucket into every worker.

        Raises:
            RefitError: a tensor was not announced, or a worker could not load it.
        """
        await self._loader.load(bucket)

    async def finish_refit(self) -> RefitAck:
        """Finalise, with the old weights' cached prefixes dropped, and sample again.

        Raises:
            RefitError: something is missing; the engine is stale.
        """
        loader = self._loader
        try:
            return await loader.finish()
        finally:
            await self._pauses.release(_REFIT)

    async def abort_refit(self) -> None:
        """End a refit that will not complete; idempotent."""
        if self._weights is not None:
            self._weights.abort()
        await self._pauses.release(_REFIT)

    async def health(self) -> dict[str, Any]:
        """Facts for the log; answers in every state."""
        api = self._api
        return {
            "backend": "trtllm",
            "state": self._state(),
            "weight_version": self.weight_version,
            "in_flight": len(self._flight),
            "requests": self._requests_done,
            "sampled_tokens": self._sampler.sampled_tokens if self._sampler is not None else 0,
            "release": api.version if api is not None else None,
            "scores_any_distribution": api is not None and api.processed_logprobs is not None,
        }

    async def shutdown(self, timeout_s: float) -> None:
        """End the workers; idempotent. Requests in flight come back as ``aborted``.

        Raises:
            DeadlineError: the workers did not end within ``timeout_s``; they do with this process.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        await self._pauses.end()
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            await self._flight.abort_all(timeout_s / 2)
            await self._flight.wait_until_empty(timeout_s / 4)
        except GenerationError:
            # Whatever still runs ends with the workers.
            pass
        await end(llm, self._name, max(deadline - time.monotonic(), 0.001))

    async def _complete(self, request: GenerationRequest, limit: int, sampler: Sampler) -> Completion:
        answer = Answer(limit)
        while not answer.ended:
            await self._pauses.pass_through()
            if self.stale:
                raise StaleWeightsError(
                    f"{self._name}: the weights are old or a mixture; sampling needs a completed refit"
                )
            pauses, version = self._pauses.count, self.weight_version
            answer.take(await sampler.sample(request, answer.token_ids, answer.room), version)
            if self._closed:
                break
            if not answer.ended and pauses == self._pauses.count:
                raise InfraError(f"{self._name}: the engine gave up a request that nobody aborted")
        self._requests_done += 1
        return answer.completion(self.weight_version)

    @asynccontextmanager
    async def _memory_deadline(self, action: str) -> AsyncGenerator[None]:
        timeout_s = self._settings.memory_timeout_s
        try:
            with classified(self._name, action):
                async with asyncio.timeout(timeout_s):
                    yield
        except TimeoutError as error:
            raise DeadlineError(f"{self._name}: could not {action} within {timeout_s:g} s") from error

    def _state(self) -> str:
        if self._closed:
            return "closed"
        if self._weights is None:
            return "starting"
        if _SLEEP in self._pauses.reasons:
            return "asleep"
        if self._weights.running:
            return "refitting"
        if self._weights.stale:
            return "stale"
        return "paused" if self._pauses.reasons else "running"

    @property
    def _loader(self) -> WeightLoader:
        self._ready()
        assert self._weights is not None
        return self._weights

    def _ready(self) -> Sampler:
        if self._closed:
            raise EngineDeadError(f"{self._name}: used after shutdown; build a new engine")
        if self._sampler is None:
            raise NotReadyError(f"{self._name}: still loads its model; try again later")
        return self._sampler

    def _require_api(self) -> TrtllmApi:
        self._ready()
        assert self._api is not None
        return self._api
