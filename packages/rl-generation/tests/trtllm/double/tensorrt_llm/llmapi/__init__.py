"""Double of ``tensorrt_llm.llmapi``."""

from ..executor.result import CompletionOutput, RequestOutput
from ..sampling_params import SamplingParams
from .llm_args import KvCacheConfig

__all__ = ["CompletionOutput", "KvCacheConfig", "RequestOutput", "SamplingParams"]
