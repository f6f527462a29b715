"""vLLM's synchronous engine: it computes in this process, one batch after another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..protocol import Completion, GenerationRequest
from .arguments import engine_arguments, executor_name, sampling_arguments
from .driver import Launched, Version
from .environment import variable_set
from .launching import facts_of, require_unquantised
from .processes import DeathWatch, importing, kill_all, making_processes, wait_until_dead
from .prompt_scores import PromptScores, prompt_scores
from .results import completion_of
from .settings import VllmSettings

T = TypeVar("T")


class SyncDriver:
    """See :class:`~rl_generation.vllm.driver.Driver`.

    vLLM runs in one thread of this object's own, so the event loop goes on meanwhile; a batch cannot be
    interrupted.

    Args:
        settings: of the engine.
        cpu: whether this vLLM is one for CPUs.
    """

    def __init__(self, settings: VllmSettings, *, cpu: bool) -> None:
        self._settings = settings
        self._cpu = cpu
        self._llm: Any = None
        self._facts: Launched | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=settings.name)
        self._turn = asyncio.Lock()
        self._held = False
        self._watch = DeathWatch()
        self._running = 0
        self._sampled = 0
        self._cached = 0

    @property
    def engine(self) -> Any:
        """vLLM's ``LLM``, to be used from this driver's thread only."""
        return self._llm

    async def launch(self) -> Launched:
        """Import vLLM and load the checkpoint here."""
        self._facts = await self._do(self._launch)
        return self._facts

    def when_dead(self, callback: Callable[[str], None]) -> None:
        """Only workers of a tensor-parallel engine can die alone."""
        assert self._facts is not None
        others = [pid for pid in self._facts.processes if pid != os.getpid()]
        self._watch.watch(others, lambda pid: callback(f"the worker's process {pid} has ended unexpectedly"))

    async def sample(self, requests: Sequence[GenerationRequest], version: Version) -> list[Completion]:
        """As one batch, after those before it."""
        assert self._facts is not None
        arguments = [
            sampling_arguments(
                request,
                max_context=self._facts.max_context,
                vocab_size=self._facts.vocab_size,
                component=self._settings.name,
            )
            for request in requests
        ]
        prompts = [request.prompt_token_ids for request in requests]
        outputs = await self._in_turn(lambda: self._generate(prompts, arguments), len(requests))
        now = version()
        completions = [completion_of(output, now, self._settings.name) for output in outputs]
        self._cached += sum(output.num_cached_tokens or 0 for output in outputs)
        return completions

    async def score(self, token_ids: tuple[int, ...], top: int = 0) -> PromptScores:
        """As prompt log-probabilities, for which vLLM reads no cache."""
        arguments = {
            "temperature": 0.0,
            "max_tokens": 1,
            "prompt_logprobs": top,
            "ignore_eos": True,
            "detokenize": False,
        }
        (output,) = await self._in_turn(lambda: self._generate([token_ids], [arguments]), 1)
        return prompt_scores(output, token_ids, self._settings.name, top=top)

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """By vLLM's collective call."""
        return await self._do(lambda: self._llm.collective_rpc(method, args=arguments))

    async def hold(self) -> None:
        """Wait for the batch that runs; the next one waits."""
        if not self._held:
            await self._turn.acquire()
            self._held = True

    async def let_go(self) -> None:
        """Undo :meth:`hold`."""
        if self._held:
            self._held = False
            self._turn.release()

    async def drop_caches(self) -> None:
        """Prefixes, media and what was computed from them."""

        def drop() -> None:
            if self._llm.reset_prefix_cache() is False:
                raise RuntimeError("vLLM did not empty its prefix cache")
            self._llm.llm_engine.reset_mm_cache()
            self._llm.llm_engine.reset_encoder_cache()

        await self._do(drop)

    async def note_version(self, version: int) -> None:
        """vLLM notes it with every batch from now on, if it can."""
        note = getattr(self._llm.llm_engine, "set_weight_version", None)
        if note is not None:
            await self._do(lambda: note(str(version)))

    async def abort_all(self) -> None:
        """A batch cannot be interrupted, and none runs while weights move."""

    async def sleep(self) -> None:
        """A GPU's weights move to the host and its cache is dropped; a CPU has nothing to give back."""
        await self.hold()
        if self._settings.can_sleep and not self._cpu:
            await self._do(lambda: self._llm.sleep(level=1))

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        if self._settings.can_sleep and not self._cpu:
            await self._do(self._llm.wake_up)
        await self.let_go()

    def counters(self) -> dict[str, int]:
        """Sampled tokens grow with each step of a batch, cached ones with each batch that has ended."""
        return {"sampled_tokens": self._sampled, "cached_prompt_tokens": self._cached}

    def in_flight(self) -> int:
        """Requests of batches that run or wait."""
        return self._running

    async def close(self, timeout_s: float) -> None:
        """Release the model; what vLLM set up for the whole process stays."""
        self._watch.close()
        llm, self._llm = self._llm, None
        processes = self._facts.processes if self._facts is not None else ()
        if llm is not None:
            ending = asyncio.ensure_future(self._do(llm.llm_engine.engine_core.shutdown))
            await asyncio.wait([ending], timeout=timeout_s)
            if ending.done():
                ending.exception()
        self._worker.shutdown(wait=False, cancel_futures=True)
        others = [pid for pid in processes if pid != os.getpid()]
        kill_all(await asyncio.to_thread(wait_until_dead, others, 1.0))

    def _launch(self) -> Launched:
        with importing():
            from vllm import LLM

        arguments = engine_arguments(self._settings, cpu=self._cpu)
        arguments["distributed_executor_backend"] = executor_name(self._settings)
        # LLM reads it when it is built: the engine's loop runs in this process.
        with variable_set("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), making_processes("spawn"):
            self._llm = LLM(**arguments)
        self._count_steps(self._llm.llm_engine.engine_core)
        config = self._llm.llm_engine.vllm_config
        require_unquantised(config, self._settings.name)
        pids = self._llm.collective_rpc("rl_pid")
        return facts_of(config, pids[0], tuple(pids))

    def _count_steps(self, core: Any) -> None:
        """Count tokens when vLLM's core gives them out: a batch may take longer than a probe may.

        ``LLM`` takes no loggers as the asynchronous engine does.
        """
        get_output = core.get_output

        def counted() -> Any:
            step = get_output()
            self._sampled += sum(len(output.new_token_ids) for output in step.outputs)
            return step

        core.get_output = counted

    def _generate(self, prompts: list[tuple[int, ...]], arguments: list[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams, TokensPrompt

        return self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
            [SamplingParams(**item) for item in arguments],
            use_tqdm=False,
        )

    async def _in_turn(self, work: Callable[[], T], requests: int) -> T:
        self._running += requests
        try:
            async with self._turn:
                return await self._do(work)
        finally:
            self._running -= requests

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)
