"""vLLM's asynchronous engine: it computes in a process of its own, and requests join while others run."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..failures import GenerationError
from ..fleet.threads import in_thread
from ..protocol import Completion, GenerationRequest
from .arguments import engine_arguments, executor_name, sampling_arguments
from .driver import Launched, Version
from .launching import facts_of, prompt_of, require_unquantised
from .processes import (
    DeathWatch,
    descendants,
    heap_frozen,
    importing,
    kill_all,
    killed_after,
    making_processes,
    start_method,
    wait_until_dead,
)
from .prompt_scores import PromptScores, prompt_scores
from .results import completion_of
from .scratch import start_files
from .settings import VllmSettings

_ASKED = 0.75
"""Of the time to end: how long processes may take to end by themselves."""

_SOCKETS = (
    "output_socket",
    "input_socket",
    "first_req_send_socket",
    "first_req_rcv_socket",
    "stats_update_socket",
)
"""Of vLLM's ``BackgroundResources``; some exist with several data-parallel engines only."""


class AsyncDriver:
    """See :class:`~rl_generation.vllm.driver.Driver`.

    The loop's thread must live as long as the engine: its process ends with that thread.

    Args:
        settings: of the engine.
        cpu: whether this vLLM is one for CPUs.
    """

    def __init__(self, settings: VllmSettings, *, cpu: bool) -> None:
        self._settings = settings
        self._cpu = cpu
        self._engine: Any = None
        self._facts: Launched | None = None
        self._meter: Any = None
        self._watch = DeathWatch()
        self._roots: tuple[int, ...] = ()
        self._at_exit: Callable[[], None] = functools.partial(kill_all, ())
        self._numbers = itertools.count()
        self._cached_prompt_tokens = 0
        self._drains = True

    @property
    def engine(self) -> Any:
        """vLLM's ``AsyncLLM``, for an HTTP server on the same loop."""
        return self._engine

    async def launch(self) -> Launched:
        """Import vLLM and start its process. Blocks the loop, on which nothing else runs yet."""
        with importing():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine import EngineCoreOutputs
            from vllm.v1.engine.async_llm import AsyncLLM

            from .metering import TokenMeter

        settings = self._settings
        arguments = engine_arguments(settings, cpu=self._cpu)
        arguments["distributed_executor_backend"] = executor_name(settings)
        config = AsyncEngineArgs(**arguments).create_engine_config()
        require_unquantised(config, settings.name)
        notes_versions = "weight_version" in EngineCoreOutputs.__struct_fields__
        self._drains = must_drain(settings, notes_versions=notes_versions)
        self._meter = TokenMeter()
        method = start_method(self._cpu, settings.cpu_threads, settings.start_method)
        with start_files():
            with making_processes(method), heap_frozen(), killed_after(settings.start_timeout_s):
                self._engine = AsyncLLM.from_vllm_config(
                    config, stat_loggers=[self._meter.logger], disable_log_stats=True
                )
            self._end_with_this_process()
            workers = await self.call_workers("rl_pid")
        self._facts = facts_of(config, workers[0], tuple(dict.fromkeys([*self._roots, *workers])))
        return self._facts

    def when_dead(self, callback: Callable[[str], None]) -> None:
        """Watches the process ids themselves: vLLM's own calls to its process would wait for ever."""
        assert self._facts is not None
        self._watch.watch(
            self._facts.processes, lambda pid: callback(f"the engine's process {pid} has ended unexpectedly")
        )

    async def sample(self, requests: Sequence[GenerationRequest], version: Version) -> list[Completion]:
        """All at once; one failure ends them all."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert self._facts is not None
        name = self._settings.name
        wanted = [
            SamplingParams(
                **sampling_arguments(
                    request,
                    max_context=self._facts.max_context,
                    vocab_size=self._facts.vocab_size,
                    component=name,
                ),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in requests
        ]

        async def complete(request: GenerationRequest, sampling: Any) -> Completion:
            output = await self._run(request.prompt_token_ids, sampling)
            # Here and not once all are done: others of them may yet wait behind a refit.
            completion = completion_of(output, version(), name)
            self._cached_prompt_tokens += output.num_cached_tokens or 0
            return completion

        return await _gather(
            [complete(request, sampling) for request, sampling in zip(requests, wanted, strict=True)]
        )

    async def score(self, token_ids: tuple[int, ...], top: int = 0) -> PromptScores:
        """As prompt log-probabilities, for which vLLM reads no cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._run(token_ids, sampling)
        return prompt_scores(output, token_ids, self._settings.name, top=top)

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """By vLLM's collective call."""
        return await self._engine.collective_rpc(method, args=arguments)

    async def hold(self) -> None:
        """Let requests wait, or finish first where nobody could tell who sampled which token."""
        mode = "wait" if self._drains else "keep"
        # What vLLM's own pause_generation calls, before it sleeps for 20 ms that a refit would have to wait.
        pause = getattr(self._engine.engine_core, "pause_scheduler_async", None)
        if pause is not None:
            await pause(mode=mode, clear_cache=False)
        else:
            await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def let_go(self) -> None:
        """Held requests go on."""
        await self._engine.resume_generation()

    async def drop_caches(self) -> None:
        """Prefixes, those of running requests too, media and what was computed from them."""
        emptied, *_ = await asyncio.gather(
            self._engine.reset_prefix_cache(reset_running_requests=True),
            self._engine.reset_mm_cache(),
            self._engine.reset_encoder_cache(),
        )
        if emptied is False:
            raise RuntimeError("vLLM did not empty its prefix cache")

    async def note_version(self, version: int) -> None:
        """vLLM notes it with every batch from now on, if it can."""
        update = getattr(self._engine, "update_weight_version", None)
        if update is not None:
            await update(str(version))

    async def abort_all(self) -> None:
        """HTTP requests included."""
        pending = list(self._engine.output_processor.request_states)
        if pending:
            await self._engine.abort(pending, internal=True)

    async def sleep(self) -> None:
        """A GPU's weights move to the host and its cache is dropped; a CPU has nothing to give back."""
        if self._settings.can_sleep and not self._cpu:
            await self._engine.sleep(level=1)
        else:
            await self.hold()
            await self.drop_caches()

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        if self._settings.can_sleep and not self._cpu:
            await self._engine.wake_up()
        await self.let_go()

    def counters(self) -> dict[str, int]:
        """Of all requests, over HTTP too; cached prompt tokens of the others only."""
        sampled = self._meter.sampled_tokens if self._meter is not None else 0
        return {"sampled_tokens": sampled, "cached_prompt_tokens": self._cached_prompt_tokens}

    def in_flight(self) -> int:
        """HTTP requests included."""
        return 0 if self._engine is None else int(self._engine.output_processor.get_num_unfinished_requests())

    async def close(self, timeout_s: float) -> None:
        """Ask the process to end, then end it."""
        self._watch.close()
        engine, self._engine = self._engine, None
        if engine is None:
            return
        # Otherwise vLLM reports the end of its process as an error.
        if engine.output_handler is not None:
            engine.output_handler.cancel()
        atexit.unregister(self._at_exit)
        left = descendants(self._roots)
        asked_s = _ASKED * timeout_s
        with contextlib.suppress(Exception):
            await in_thread(
                lambda: engine.shutdown(timeout=asked_s), "vllm-shutdown", asked_s + timeout_s / 10
            )
        _close_sockets(engine.engine_core.resources)
        kill_all(wait_until_dead(left, 0.0))
        await asyncio.to_thread(wait_until_dead, left, timeout_s / 10)

    def _end_with_this_process(self) -> None:
        manager = self._engine.engine_core.resources.engine_manager
        self._roots = tuple(process.pid for process in manager.processes)
        # Python waits for its children before vLLM's own finalizers would end them.
        self._at_exit = functools.partial(kill_all, self._roots)
        atexit.register(self._at_exit)

    async def _run(self, token_ids: tuple[int, ...], sampling: Any) -> Any:
        request = f"{self._settings.name}-{next(self._numbers)}"
        outputs = self._engine.generate(prompt_of(token_ids), sampling, request)
        # Only the final one comes.
        return [output async for output in outputs][-1]


def must_drain(settings: VllmSettings, *, notes_versions: bool) -> bool:
    """Whether requests in flight have to end before weights change.

    Args:
        settings: of the engine.
        notes_versions: whether this vLLM says of each token which weights sampled it.

    Raises:
        GenerationError: they shall go on, and nobody could tell who sampled which token.
    """
    if settings.in_flight == "continue" and not notes_versions:
        raise GenerationError(
            f"{settings.name}: in_flight='continue' needs a vLLM that notes with each token which weights "
            "sampled it, and this one does not; leave in_flight out, or install a newer vLLM"
        )
    return settings.in_flight == "drain" or not notes_versions


def _close_sockets(resources: Any) -> None:
    """What vLLM's client would do on this loop, to which the sockets belong, before it is let go.

    A thread of vLLM's that sees the process die takes this upon itself and asks the loop for it. If the
    client is let go before that, zmq's context blocks the loop until its sockets are closed: for ever.
    """
    for name in _SOCKETS:
        socket = getattr(resources, name, None)
        if socket is not None:
            socket.close(linger=0)


async def _gather(work: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
