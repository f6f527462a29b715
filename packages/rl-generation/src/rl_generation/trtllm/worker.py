"""An engine and its server in an actor of Ray's, or in any process with an event loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..failures import GenerationError, InvalidRequestError, StaleWeightsError
from ..fleet.replica import ReplicaFacts
from ..fleet.threads import in_thread
from ..protocol import Completion, GenerationRequest, RefitSpec, SamplingParams
from ..refit.contract import Bucket, RefitAck
from ..refit.settings import TransportSettings
from ..server.parsing import AnswerParser, PlainParser
from ..server.reservation import ListenSettings, Reservation
from ..server.settings import ServerSettings
from .availability import require_available
from .engine import TrtllmEngine
from .environment import workers_environment
from .settings import TrtllmSettings


class TrtllmWorker:
    """Has the methods of :class:`~rl_generation.fleet.replica.EngineActor`, all on one event loop.

    The actor asks Ray for no GPU: TensorRT-LLM's own workers do.

    Args:
        settings: of the engine.
        listen: where the server listens; ``None`` serves no HTTP.
        server: of the server. Its context and vocabulary are the engine's, whatever it says; ``None`` serves
            under the engine's name, as in training with temperature 1.
        parser: reads thinking and tool calls in answers; by default all of an answer is visible text.
        transport: of the policy's side of refits.
        check: says what is missing on this machine before anything is imported.
    """

    def __init__(
        self,
        settings: TrtllmSettings,
        listen: ListenSettings | None = None,
        server: ServerSettings | None = None,
        parser: AnswerParser | None = None,
        transport: TransportSettings | None = None,
        *,
        check: Callable[[], None] = require_available,
    ) -> None:
        self._settings = settings
        self._listen = listen
        self._server = server
        self._parser = parser or PlainParser()
        self._transport = transport
        self._check = check
        self._engine = self._new_engine()
        self._reservation: Reservation | None = None
        self._started = self._serves = False

    async def reserve(self, port: int = 0) -> str | None:
        """See :class:`~rl_generation.fleet.replica.EngineActor`; the URL of the OpenAI API.

        Raises:
            InfraError: no port is free.
        """
        if self._listen is None:
            return None
        if self._reservation is None:
            self._reservation = Reservation(self._listen, port)
        return self._reservation.base_url

    async def start(self, *, stale: bool = False) -> ReplicaFacts:
        """See :class:`~rl_generation.fleet.replica.Engine`.

        Raises:
            GenerationError: see :meth:`~rl_generation.trtllm.engine.TrtllmEngine.start`.
            InvalidRequestError: a profile of the server asks for what this release cannot score.
        """
        await self.reserve()
        for name, value in workers_environment(os.environ, sys.executable).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._started:
            # Its workers are gone, or are not wanted any more.
            self._serves = False
            with contextlib.suppress(GenerationError):
                await self._engine.shutdown(self._settings.probe_timeout_s)
            self._engine = self._new_engine()
        self._started = True
        facts = await self._engine.start(stale=stale)
        if self._reservation is not None:
            try:
                await self._serve(self._reservation, facts)
            except BaseException:
                await self._engine.shutdown(self._settings.probe_timeout_s)
                raise
        return facts

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        return await self._engine.generate(requests)

    async def probe(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.probe()

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._engine.begin_refit(spec, version)

    async def load_bucket(self, bucket: Bucket) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._engine.load_bucket(bucket)

    async def finish_refit(self) -> RefitAck:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        try:
            return await self._engine.finish_refit()
        finally:
            self._open_or_shut()

    async def abort_refit(self) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        try:
            await self._engine.abort_refit()
        finally:
            self._open_or_shut()

    async def pause(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.pause()

    async def resume(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.resume()

    async def sleep(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.sleep()

    async def wake(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.wake()

    async def health(self) -> dict[str, Any]:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        url = self._reservation.base_url if self._reservation is not None else None
        return {**await self._engine.health(), "url": url}

    async def shutdown(self, timeout_s: float) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        reservation, self._reservation = self._reservation, None
        try:
            await self._engine.shutdown(0.7 * timeout_s)
        finally:
            if reservation is not None:
                await reservation.aclose(0.3 * timeout_s)

    def _new_engine(self) -> TrtllmEngine:
        return TrtllmEngine(self._settings, self._transport, check=self._check)

    async def _serve(self, reservation: Reservation, facts: ReplicaFacts) -> None:
        # The extra is needed by whoever serves.
        from ..server.app import create_app

        wanted = self._server or ServerSettings(self._settings.name, facts.max_context, facts.vocab_size)
        server = dataclasses.replace(wanted, max_context=facts.max_context, vocab_size=facts.vocab_size)
        for profile in server.profiles:
            asked = SamplingParams(1, profile.temperature, profile.top_p, profile.top_k)
            if not self._engine.can_score(asked):
                raise InvalidRequestError(
                    f"{self._settings.name}: the server's profile {profile.name!r} samples with temperature "
                    f"{profile.temperature:g}, top_p {profile.top_p:g}, top_k {profile.top_k}, which this "
                    "release of TensorRT-LLM cannot score; leave the profile out or use a newer release",
                    "profiles",
                )
        tokenizer = await in_thread(
            self._load_tokenizer, f"{self._settings.name}: its tokenizer", self._settings.start_timeout_s
        )
        await reservation.attach_here(create_app(self._engine, tokenizer, server, self._parser))
        self._serves = True
        self._open_or_shut()

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            Path(self._settings.model), trust_remote_code=self._settings.trust_remote_code
        )

    def _open_or_shut(self) -> None:
        if self._reservation is None or not self._serves:
            return
        if self._engine.stale:
            self._reservation.shut(
                StaleWeightsError(
                    f"{self._settings.name}: the weights are old or a mixture; serving needs a refit"
                )
            )
        else:
            self._reservation.reopen()
