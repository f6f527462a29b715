"""Settings and requests in vLLM's own words. Importing this does not import vLLM."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..failures import ContextOverflowError, InvalidRequestError
from ..model_dtype import resolved_dtype
from ..protocol import GenerationRequest
from .seeds import request_seed
from .settings import VllmSettings

LEAST_TEMPERATURE = 1e-2
"""Below it vLLM samples with this one instead, so the policy would score another distribution."""

OWNER = "rl_generation_owner"
"""Where vLLM's configuration carries the id of the process that wants the engine."""

TRANSPORT = "rl_generation_transport"
"""Where it carries the fields of :class:`~rl_generation.refit.settings.TransportSettings`."""

CPU_KV_CACHE_BYTES = 256 << 20
"""On a CPU, where vLLM would take a share of the whole machine's memory."""


def engine_arguments(settings: VllmSettings, *, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``, except for the executor."""
    arguments: dict[str, Any] = {
        "model": settings.model_dir,
        "dtype": resolved_dtype(settings.dtype, settings.model_dir),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.engine_seed,
        "load_format": settings.load_format,
        "skip_tokenizer_init": not settings.tokenizer,
        "enable_prefix_caching": settings.prefix_cache,
        "trust_remote_code": settings.trust_remote_code,
        # The checkpoint's own sampling defaults never apply.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "additional_config": {OWNER: os.getpid(), TRANSPORT: dataclasses.asdict(settings.transport)},
        "worker_cls": f"{__package__}.{'cpu' if cpu else 'gpu'}_worker.RefitWorker",
        "disable_log_stats": True,
    }
    if settings.max_model_len is not None:
        arguments["max_model_len"] = settings.max_model_len
    kv_cache_bytes = settings.kv_cache_bytes or (CPU_KV_CACHE_BYTES if cpu else None)
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    if settings.can_sleep and not cpu:
        arguments["enable_sleep_mode"] = True
    if cpu if settings.eager is None else settings.eager:
        arguments["enforce_eager"] = True
    if cpu:
        # A prompt that a step takes only part of is sampled from all the same, and the draw taken back. vLLM
        # cannot do that with a CPU's generator, which a seeded request has, and its engine dies of it.
        arguments["enable_chunked_prefill"] = False
    return arguments | dict(settings.engine_arguments)


def executor_name(settings: VllmSettings) -> str:
    """Qualified name of the class that makes the worker processes."""
    kind = "OneProcess" if settings.tensor_parallel_size == 1 else "ManyProcesses"
    return f"{__package__}.executors.{kind}"


def sampling_arguments(
    request: GenerationRequest, *, max_context: int, vocab_size: int, component: str
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``SamplingParams``: all that decide a distribution, none left to a default.

    Args:
        request: what is to be sampled.
        max_context: the most tokens that prompt and completion may have together.
        vocab_size: token ids lie below it.
        component: name that errors begin with.

    Raises:
        ContextOverflowError: there is no room for a token.
        InvalidRequestError: an empty prompt, a token id that is none, or a temperature that vLLM would
        change.
    """
    sampling = request.sampling
    check_prompt(
        request.prompt_token_ids, max_context=max_context, vocab_size=vocab_size, component=component
    )
    room = max_context - len(request.prompt_token_ids)
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise InvalidRequestError(
            f"{component}: a temperature of {sampling.temperature:g} would be raised to "
            f"{LEAST_TEMPERATURE:g} by vLLM, so the tokens could not be scored; take 0 for greedy decoding",
            "temperature",
        )
    greedy = sampling.temperature == 0
    return {
        "n": 1,
        "temperature": float(sampling.temperature),
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": request_seed(sampling.seed),
        "max_tokens": min(sampling.max_new_tokens, room),
        "min_tokens": 0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        # The log-probability of the sampled token alone.
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }


def check_prompt(token_ids: tuple[int, ...], *, max_context: int, vocab_size: int, component: str) -> None:
    """Refuse a prompt that cannot be continued.

    Raises:
        ContextOverflowError: it leaves no room for a single token.
        InvalidRequestError: it is empty, or has an id outside the vocabulary.
    """
    if not token_ids:
        raise InvalidRequestError(
            f"{component}: an empty prompt; give at least one token", "prompt_token_ids"
        )
    if len(token_ids) >= max_context:
        raise ContextOverflowError(component, len(token_ids), max_context)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        odd = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{component}: token id {odd} lies outside the vocabulary of {vocab_size}", "prompt_token_ids"
        )
