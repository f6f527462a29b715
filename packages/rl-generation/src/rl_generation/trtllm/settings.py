"""How one TensorRT-LLM engine is built, and how long anything may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

OWN_ARGUMENTS = {
    "dtype": "dtype",
    "enable_sleep": "can_sleep",
    "kv_cache_config": "prefix_cache and gpu_memory_fraction",
    "load_format": "load_format",
    "max_batch_size": "max_batch",
    "max_num_tokens": "max_batch_tokens",
    "max_seq_len": "max_context",
    "model": "model",
    "per_worker_gpu_share": "worker_gpu_share",
    "placement_bundle_indices": "bundle_indices",
    "placement_groups": "placement_groups",
    "sleep_config": "can_sleep",
    "tensor_parallel_size": "tensor_parallel",
    "trust_remote_code": "trust_remote_code",
}
"""TensorRT-LLM's names of what is set by a field of :class:`TrtllmSettings`, and of which."""

_FIXED = frozenset(
    {
        "backend",
        "orchestrator_type",
        "ray_placement_config",
        "ray_worker_extension_cls",
        "sampler_type",
        "skip_tokenizer_init",
    }
)
_UNSCORABLE = frozenset(
    {
        "batched_logits_processor",
        "enable_lora",
        "lora_config",
        "quant_config",
        "speculative_config",
        "speculative_model",
    }
)


@dataclass(frozen=True, slots=True)
class TrtllmSettings:
    """One engine: one copy of the model on ``tensor_parallel`` GPUs.

    Attributes:
        model: folder of a model in HF layout; refits compare announcements with its safetensors.
        name: stands in every error and log line.
        max_context: the most tokens that prompt and completion may have together.
        max_batch: requests that are decoded at once; more wait inside the engine.
        max_batch_tokens: prompt tokens that one step may take; ``None`` leaves it to the engine.
        tensor_parallel: GPUs that one copy of the model is spread over.
        dtype: of weights and activations, torch's name without the prefix; ``auto`` is the checkpoint's.
        load_format: ``auto`` reads the checkpoint; ``dummy`` starts with numbers without meaning, so that the
            engine counts as stale and serves nothing before its first refit.
        seed: of the job. Requests without a seed draw from a state that it and ``replica`` decide.
        replica: number of this engine among those of the job.
        weight_version: of the checkpoint.
        prefix_cache: whether prompts share what they have in common. A refit always empties it.
        gpu_memory_fraction: part of the GPU's free memory, in (0, 1), that the key-value cache takes.
        worker_gpu_share: part of a GPU, in (0, 1], that each worker asks Ray for; less than 1 where the
            policy is on the same GPU.
        placement_groups: Ray's, to put the workers in; empty lets TensorRT-LLM make its own.
        bundle_indices: one tuple of bundles per placement group, one bundle per worker.
        can_sleep: whether memory can be given back; it costs a special allocator.
        trust_remote_code: run code that came with the model.
        llm_arguments: passed on to ``AsyncLLM`` as they are.
        start_timeout_s: to load the model and to compile.
        request_timeout_s: to sample one request, from admission to its last token, without pauses.
        pause_timeout_s: to wait for a pause or a refit to end, or for requests in flight to stop for one.
        refit_timeout_s: to load one bucket, and to finish.
        memory_timeout_s: to give memory back or to take it again.
        probe_timeout_s: for one token, or for one sign of life.

    Raises:
        ValueError: a value outside its range, or an argument of ``AsyncLLM`` that is set above or that makes
            tokens inexact or impossible to score. Names it.
    """

    model: str
    name: str = "trtllm-0"
    max_context: int = 4096
    max_batch: int = 256
    max_batch_tokens: int | None = None
    tensor_parallel: int = 1
    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    replica: int = 0
    weight_version: int = 0
    prefix_cache: bool = True
    gpu_memory_fraction: float = 0.85
    worker_gpu_share: float = 1.0
    placement_groups: tuple[Any, ...] = ()
    bundle_indices: tuple[tuple[int, ...], ...] = ()
    can_sleep: bool = False
    trust_remote_code: bool = False
    llm_arguments: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 1800.0
    request_timeout_s: float = 600.0
    pause_timeout_s: float = 300.0
    refit_timeout_s: float = 300.0
    memory_timeout_s: float = 120.0
    probe_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        least = {"max_context": 2, "max_batch": 1, "tensor_parallel": 1, "seed": 0, "replica": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if not 0 < self.gpu_memory_fraction < 1:
            raise ValueError(f"gpu_memory_fraction must lie in (0, 1), got {self.gpu_memory_fraction}")
        if not 0 < self.worker_gpu_share <= 1:
            raise ValueError(f"worker_gpu_share must lie in (0, 1], got {self.worker_gpu_share}")
        if len(self.bundle_indices) != len(self.placement_groups):
            raise ValueError(
                f"bundle_indices must have one tuple per placement group, got {len(self.bundle_indices)} for "
                f"{len(self.placement_groups)}"
            )
        bundles = sum(map(len, self.bundle_indices))
        if self.placement_groups and bundles != self.tensor_parallel:
            raise ValueError(
                f"bundle_indices must name one bundle per worker, got {bundles} for {self.tensor_parallel}"
            )
        for name in (item.name for item in fields(self) if item.name.endswith("_timeout_s")):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number of seconds > 0, got {getattr(self, name)}")
        for name in self.llm_arguments:
            _refuse_argument(name)


def _refuse_argument(name: str) -> None:
    if name in OWN_ARGUMENTS:
        raise ValueError(f"llm_arguments has {name!r}; set {OWN_ARGUMENTS[name]} of the settings instead")
    if name in _FIXED:
        raise ValueError(f"llm_arguments has {name!r}, which is not free: tokens would not be exact")
    if name in _UNSCORABLE:
        raise ValueError(
            f"llm_arguments has {name!r}: the policy could not score what is sampled then; leave it out"
        )
