"""Double of ``tensorrt_llm.llmapi.llm_args``."""

from __future__ import annotations

from typing import Any

from .._double.release import allowed, has, refuse_unknown


class TorchLlmArgs:
    """Only its field names are ever looked at."""

    model_fields = dict.fromkeys(allowed("tensorrt_llm.llmapi.llm_args.TorchLlmArgs"))


class KvCacheConfig:
    """Of the key-value cache."""

    def __init__(
        self, enable_block_reuse: bool = True, free_gpu_memory_fraction: float | None = None, **more: Any
    ):
        refuse_unknown("tensorrt_llm.llmapi.KvCacheConfig", more)
        self.enable_block_reuse = enable_block_reuse
        self.free_gpu_memory_fraction = free_gpu_memory_fraction


if has("1.3"):
    from .._torch.virtual_memory import ExecutorMemoryType

    class SleepConfig:
        """Lets memory be released."""

    __all__ = ["ExecutorMemoryType", "KvCacheConfig", "SleepConfig", "TorchLlmArgs"]
else:
    __all__ = ["KvCacheConfig", "TorchLlmArgs"]
