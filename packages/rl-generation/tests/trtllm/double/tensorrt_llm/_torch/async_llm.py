"""Double of ``tensorrt_llm._torch.async_llm``: requests are tasks of the loop, workers are objects."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from .._double.decoding import Decoder, processed
from .._double.quirks import QUIRKS
from .._double.release import RELEASE, has, refuse_unknown
from ..executor.ray_gpu_worker import RayWorkerWrapper
from ..executor.result import Logprob, RequestOutput
from ..sampling_params import SamplingParams

_SET_BY_CALLER = {"end_id", "temperature", "top_k", "top_p", "seed"}


class AsyncLLM:
    """See the contract."""

    def __init__(
        self,
        placement_groups: list[Any] | None = None,
        placement_bundle_indices: list[list[int]] | None = None,
        per_worker_gpu_share: float | None = None,
        **arguments: Any,
    ) -> None:
        refuse_unknown("tensorrt_llm.AsyncLLM", arguments)
        if arguments["backend"] != "pytorch" or not arguments["skip_tokenizer_init"]:
            raise ValueError("double: only token ids on the PyTorch backend")
        self.arguments = arguments
        self.placement = (placement_groups, placement_bundle_indices, per_worker_gpu_share)
        self.workers: list[RayWorkerWrapper] = []
        self.submitted: list[SamplingParams] = []
        self.handles: list[RequestOutput] = []
        self.is_shut = False
        self._active: set[asyncio.Task[None]] = set()
        self._running: list[RequestOutput] = []
        self._paused = False

    async def setup_async(self) -> AsyncLLM:
        """Start the workers."""
        if QUIRKS.setup_delay_s:
            await asyncio.sleep(QUIRKS.setup_delay_s)
        ranks = range(self.arguments["tensor_parallel_size"])
        self.workers = [RayWorkerWrapper(rank, self.arguments) for rank in ranks]
        return self

    def generate_async(
        self, inputs: Sequence[int], sampling_params: Any = None, streaming: bool = False, **more: Any
    ) -> RequestOutput:
        """Submit a request."""
        refuse_unknown("tensorrt_llm.AsyncLLM.generate_async", more)
        if self.is_shut:
            raise RuntimeError("LLM is shutting down")
        if self._paused:
            raise RuntimeError("AsyncLLM is paused. Call resume_generation() before submitting new requests.")
        if not isinstance(sampling_params, SamplingParams) or streaming:
            raise TypeError("double: expected SamplingParams, and no streaming")
        unset = {name for name in _SET_BY_CALLER if getattr(sampling_params, name) is None}
        if unset:
            raise TypeError(f"double: {sorted(unset)} would come from hidden defaults")
        if len(inputs) >= self.arguments["max_seq_len"]:
            raise ValueError(f"The sum of prompt length ({len(inputs)}) should not exceed max_num_tokens")
        self._refuse_unfit()
        handle = RequestOutput(tuple(inputs), sampling_params)
        self.submitted.append(sampling_params)
        self.handles.append(handle)
        self._running.append(handle)
        task = asyncio.ensure_future(self._run(handle))
        self._active.add(task)
        task.add_done_callback(self._active.discard)
        return handle

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a worker's method on every worker, with arguments of their own, as between processes."""
        if self.is_shut:
            raise RuntimeError("LLM is shutting down")
        if method == "update_weights" and self._active:
            await asyncio.wait(set(self._active))
        packed = pickle.dumps((args, kwargs or {}))
        answers = []
        for worker in self.workers:
            arguments, named = pickle.loads(packed)
            answers.append(getattr(worker, method)(*arguments, **named))
        return answers

    async def update_weights(self, weights: dict[str, Any] | None) -> None:
        """See ``WorkerExtension``."""
        await self.collective_rpc("update_weights", args=(weights,))

    async def release(self, tags: list[str]) -> None:
        """Give memory back."""
        await self.collective_rpc("sleep", args=(tags,))

    async def resume(self, tags: list[str]) -> None:
        """Take it again."""
        await self.collective_rpc("wakeup", args=(tags,))

    if has("1.3"):

        async def pause_generation(self) -> None:
            """Abort everything and wait until nothing is left."""
            self._paused = True
            for handle in self._running:
                handle.abort()
            if self._active:
                await asyncio.wait(set(self._active))

        async def resume_generation(self) -> None:
            """Take requests again."""
            self._paused = False

    def shutdown(self) -> None:
        """End the workers."""
        self.is_shut = True

    def _refuse_unfit(self) -> None:
        for worker in self.workers:
            if worker.half_loaded:
                raise AssertionError("double: a request between the first bucket and the end of a refit")
            if worker.released:
                raise AssertionError("double: a request while memory is released")

    async def _run(self, handle: RequestOutput) -> None:
        try:
            await self._decode(handle)
            handle.done.set_result(None)
        except Exception as error:
            handle.done.set_exception(error)
        finally:
            self._running.remove(handle)

    async def _decode(self, handle: RequestOutput) -> None:
        params, output = handle.params, handle.outputs[0]
        worker = self.workers[0]
        reuse = self.arguments["kv_cache_config"].enable_block_reuse
        decoder = Decoder(worker.model, handle.prompt_token_ids, worker.prefixes if reuse else None)
        handle.cached_tokens = decoder.cached
        draws = torch.Generator().manual_seed(params.seed % (1 << 63))
        stops = set(params.stop_token_ids or ()) | {params.end_id}
        room = min(params.max_tokens, self.arguments["max_seq_len"] - len(handle.prompt_token_ids))
        while True:
            if inspect.iscoroutinefunction(QUIRKS.on_step):
                await QUIRKS.on_step(handle)
            await asyncio.sleep(0)
            if handle.is_aborted:
                output.finish_reason = "cancelled"
                output.logprobs += output.logprobs[-1:] * QUIRKS.extra_logprobs_after_abort
                break
            token, entry = _draw(decoder.logits(), params, draws)
            output.token_ids.append(token)
            output.logprobs.append(entry)
            decoder.append(token)
            if token in stops:
                output.finish_reason = "stop"
                _end_with(output, token, params)
                break
            if len(output.token_ids) >= room:
                output.finish_reason = "length"
                break
        decoder.end()
        if not _wants_logprobs(params):
            output.logprobs = []


def _end_with(output: Any, token: int, params: Any) -> None:
    repeated = QUIRKS.repeated_stop_tokens
    last = output.logprobs[-1]
    output.token_ids += [token] * repeated
    output.logprobs += [last if isinstance(last, float) else {token: Logprob(-0.5, 1)}] * repeated
    if not params.include_stop_str_in_output or QUIRKS.drops_stop_token:
        # The log-probabilities stay, as they do there.
        output.token_ids = [kept for kept in output.token_ids if kept != token]


def _draw(logits: torch.Tensor, params: Any, draws: torch.Generator) -> tuple[int, Any]:
    raw = logits.log_softmax(-1)
    if params.is_greedy:
        chosen, token = raw, int(raw.argmax())
    else:
        chosen = processed(logits, params)
        token = int(torch.multinomial(chosen.exp(), 1, generator=draws))
    mode = getattr(params, "logprobs_mode", None)
    scores = chosen if mode is not None and mode.name == "PROCESSED" else raw
    if getattr(params, "logprobs_simple_format", False):
        return token, float(scores[token])
    likeliest = scores.topk(params.logprobs or 0).indices.tolist()
    candidates = [*likeliest, *([] if token in likeliest else [token])]
    return token, {c: Logprob(float(scores[c]), rank + 1) for rank, c in enumerate(candidates)}


def _wants_logprobs(params: Any) -> bool:
    return params.logprobs is not None and (params.logprobs > 0 or RELEASE >= "1.3")
