"""TensorRT-LLM's own names, and which of its newer abilities this release has."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..failures import UnavailableBackendError
from .availability import COMPONENT, OLDEST

_MEMORY_TYPE_HOMES = ("tensorrt_llm.llmapi.llm_args", "tensorrt_llm._torch.virtual_memory")


@dataclass(frozen=True, slots=True)
class TrtllmApi:
    """What one release offers.

    Attributes:
        version: the package's own word.
        async_llm: the class ``AsyncLLM``.
        sampling_params: the class ``SamplingParams``.
        kv_cache_config: the class ``KvCacheConfig``.
        processed_logprobs: the value of ``SamplingParams.logprobs_mode`` for which log-probabilities are of
            the distribution that is sampled from; ``None`` where the release knows none and reports only
            those of the untempered, unfiltered distribution.
        flat_logprobs: whether it returns plain numbers on request.
        sleep_arguments: what ``AsyncLLM`` is given so that memory can be released.
        memory_tags: everything that can be released.
        pauses: whether ``AsyncLLM`` itself can abort all requests and wait until none is left.
        empties_prefix_cache: whether the stock worker extension can be told to.
    """

    version: str
    async_llm: Any
    sampling_params: Any
    kv_cache_config: Any
    processed_logprobs: Any
    flat_logprobs: bool
    sleep_arguments: Mapping[str, Any]
    memory_tags: tuple[str, ...]
    pauses: bool
    empties_prefix_cache: bool


def load_api() -> TrtllmApi:
    """Import the package and look at it.

    Raises:
        UnavailableBackendError: it cannot be imported, or is too old; keeps the cause.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
        async_llm = package.AsyncLLM
        parameters = package.SamplingParams
        kv_cache_config = importlib.import_module("tensorrt_llm.llmapi").KvCacheConfig
        arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args")
        memory_types = _memory_types()
        extension = importlib.import_module("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise UnavailableBackendError(
            f"{COMPONENT} cannot be used: {type(error).__name__}: {error}; expected release {OLDEST} or "
            "newer with its CUDA libraries"
        ) from error
    sampling_fields = {entry.name for entry in dataclasses.fields(parameters)}
    modes = importlib.import_module("tensorrt_llm.sampling_params")
    return TrtllmApi(
        version=str(getattr(package, "__version__", "unknown")),
        async_llm=async_llm,
        sampling_params=parameters,
        kv_cache_config=kv_cache_config,
        processed_logprobs=modes.LogprobMode.PROCESSED if "logprobs_mode" in sampling_fields else None,
        flat_logprobs="logprobs_simple_format" in sampling_fields,
        sleep_arguments=_sleep_arguments(arguments),
        # Names that begin with an underscore are of memory that is never released.
        memory_tags=tuple(kind.value for kind in memory_types if not kind.value.startswith("_")),
        pauses=hasattr(async_llm, "pause_generation"),
        empties_prefix_cache=hasattr(extension, "reset_prefix_cache"),
    )


def _memory_types() -> Any:
    for home in _MEMORY_TYPE_HOMES:
        try:
            return importlib.import_module(home).ExecutorMemoryType
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"ExecutorMemoryType is in none of {', '.join(_MEMORY_TYPE_HOMES)}")


def _sleep_arguments(arguments: Any) -> Mapping[str, Any]:
    known = arguments.TorchLlmArgs.model_fields
    if "sleep_config" in known:
        return {"sleep_config": arguments.SleepConfig()}
    return {"enable_sleep": True} if "enable_sleep" in known else {}
