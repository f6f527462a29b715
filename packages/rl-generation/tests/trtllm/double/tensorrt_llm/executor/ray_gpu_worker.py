"""Double of ``tensorrt_llm.executor.ray_gpu_worker``: a worker in this process, on the CPU."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .._double.decoding import PrefixCache
from .._torch.virtual_memory import ExecutorMemoryType
from ..llmapi.rlhf_utils import WorkerExtension


@functools.cache
def _loaded(folder: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


class RayWorkerWrapper(WorkerExtension):
    """Holds the whole model, whatever its rank."""

    def __init__(self, rank: int, arguments: dict[str, Any]) -> None:
        self.device_id = "cpu"
        self.device_uuid = f"GPU-double-{rank}"
        self.half_loaded = False
        self.released: set[ExecutorMemoryType] = set()
        self.prefixes = PrefixCache()
        self._can_sleep = bool(arguments.get("enable_sleep") or arguments.get("sleep_config"))
        dtype = arguments.get("dtype", "auto")
        if arguments.get("load_format") == "dummy":
            torch.manual_seed(rank)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments["model"]))
        else:
            model = copy.deepcopy(_loaded(arguments["model"], dtype))
        self.model = model.eval()

    def report_device_id(self) -> str:
        """UUID of the worker's GPU."""
        return self.device_uuid

    def sleep(self, tags: list[str]) -> None:
        """Release memory."""
        if not self._can_sleep:
            raise RuntimeError("sleep is not enabled")
        self.released |= {ExecutorMemoryType(tag) for tag in tags}
        if ExecutorMemoryType.KV_CACHE in self.released:
            self.prefixes.lose_memory()

    def wakeup(self, tags: list[str]) -> None:
        """Take it again."""
        self.released -= {ExecutorMemoryType(tag) for tag in tags}
