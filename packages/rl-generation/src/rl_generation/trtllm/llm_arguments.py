"""What ``AsyncLLM`` is built with."""

from __future__ import annotations

from typing import Any

from ..model_dtype import resolved_dtype
from .api import TrtllmApi
from .settings import TrtllmSettings


def llm_arguments(settings: TrtllmSettings, api: TrtllmApi) -> dict[str, Any]:
    """Keyword arguments of ``AsyncLLM`` for these settings in this release."""
    # Memory that is given back takes the cached prefixes with it, but not the index that leads to them. A
    # release that cannot be told to forget the index must not have one.
    reuse = settings.prefix_cache and (not settings.can_sleep or api.empties_prefix_cache)
    arguments: dict[str, Any] = {
        "model": settings.model,
        "backend": "pytorch",
        # Token ids in, token ids out.
        "skip_tokenizer_init": True,
        "tensor_parallel_size": settings.tensor_parallel,
        "dtype": resolved_dtype(settings.dtype, settings.model),
        "load_format": settings.load_format,
        "max_seq_len": settings.max_context,
        "max_batch_size": settings.max_batch,
        "trust_remote_code": settings.trust_remote_code,
        "kv_cache_config": api.kv_cache_config(
            enable_block_reuse=reuse, free_gpu_memory_fraction=settings.gpu_memory_fraction
        ),
        "per_worker_gpu_share": settings.worker_gpu_share,
    }
    if settings.max_batch_tokens is not None:
        arguments["max_num_tokens"] = settings.max_batch_tokens
    if settings.placement_groups:
        arguments["placement_groups"] = list(settings.placement_groups)
        arguments["placement_bundle_indices"] = [list(bundles) for bundles in settings.bundle_indices]
    if settings.can_sleep:
        arguments.update(api.sleep_arguments)
    return {**arguments, **settings.llm_arguments}
