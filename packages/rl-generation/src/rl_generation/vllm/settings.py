"""How one vLLM engine is built, and how long anything may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..refit.settings import TransportSettings
from .seeds import engine_seed

OWN_ARGUMENTS = {
    "dtype": "dtype",
    "enable_prefix_caching": "prefix_cache",
    "enable_sleep_mode": "can_sleep",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "load_format": "load_format",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "model": "model_dir",
    "seed": "seed",
    "skip_tokenizer_init": "tokenizer",
    "tensor_parallel_size": "tensor_parallel_size",
    "trust_remote_code": "trust_remote_code",
}
"""vLLM's names of what is set by a field of :class:`VllmSettings`, and of which."""

_FIXED = frozenset(
    {
        "additional_config",
        "data_parallel_size",
        "distributed_executor_backend",
        "generation_config",
        # Caches elsewhere outlive the weights.
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_transfer_config",
        "logprobs_mode",
        "override_generation_config",
        "worker_cls",
        "worker_extension_cls",
    }
)
_UNSCORABLE = frozenset(
    {
        "calculate_kv_scales",
        "enable_lora",
        "kv_cache_dtype",
        "logits_processors",
        "quantization",
        "quantization_config",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "speculative_config",
        "watermark_config",
    }
)


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """One engine: one copy of the model on ``tensor_parallel_size`` devices.

    How a request is sampled is not here: every request says all of it.

    Attributes:
        model_dir: folder of a model in HF layout; refits compare announcements with its safetensors.
        name: stands in every error and log line.
        dtype: of weights and activations, torch's name without the prefix; ``auto`` is the checkpoint's.
        max_model_len: the most tokens that prompt and completion may have together; ``None`` is the model's.
        tensor_parallel_size: devices, or on a CPU processes, that one copy of the model is spread over.
        kv_cache_bytes: size of the key-value cache of each of them. On a GPU ``None`` takes a share of its
            memory; on a CPU that share would be one of the whole machine, so ``None`` is 256 MiB there.
        max_num_seqs: requests that are decoded at once; more wait inside the engine.
        seed: of the job. Requests without a seed draw from a state that it and ``replica`` decide.
        replica: number of this engine among those of the job.
        weight_version: of the checkpoint.
        load_format: ``auto`` reads the checkpoint; ``dummy`` starts with numbers without meaning, so that the
            engine is stale and serves nothing before its first refit.
        tokenizer: whether the folder has a tokenizer. Without one there are tokens only, and no chat.
        prefix_cache: whether prompts share what they have in common. A refit always empties it.
        can_sleep: whether a GPU's memory can be given back; it costs a special allocator.
        cpu_threads: of each process that computes, on a CPU.
        eager: without compiling; ``None`` does so on a CPU, where compiling costs more than a job gains.
        start_method: how the engine's process is made; ``None`` forks where that is safe, which saves the
            import of vLLM in it.
        in_flight: what a refit does to requests in flight: they wait and go on with the new weights, or it
            waits until they are done. The former, for which ``None`` stands then, needs a vLLM that records
            who sampled each token.
        trust_remote_code: run code that came with the model.
        transport: of the policy's side of refits; its folder, address and deadline hold for the workers too.
        engine_arguments: passed on to vLLM's ``EngineArgs``.
        start_timeout_s: to load the model.
        request_timeout_s: for one request, waiting and pauses included.
        control_timeout_s: for pause, resume, sleep, wake, and for all requests in flight to end where one of
            these waits for them.
        refit_timeout_s: to load one bucket, or to finish.
        probe_timeout_s: for one token.

    Raises:
        ValueError: a value outside its range, or an engine argument that this package decides, or that makes
            sampled tokens impossible to score. Names it.
    """

    model_dir: str
    name: str = "vllm-0"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 256
    seed: int = 0
    replica: int = 0
    weight_version: int = 0
    load_format: Literal["auto", "dummy"] = "auto"
    tokenizer: bool = True
    prefix_cache: bool = True
    can_sleep: bool = False
    cpu_threads: int = 1
    eager: bool | None = None
    start_method: Literal["fork", "spawn"] | None = None
    in_flight: Literal["continue", "drain"] | None = None
    trust_remote_code: bool = False
    transport: TransportSettings = field(default_factory=TransportSettings)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    request_timeout_s: float = 1800.0
    control_timeout_s: float = 60.0
    refit_timeout_s: float = 120.0
    probe_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_num_seqs", "cpu_threads"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("seed", "replica", "weight_version"):
            _require_at_least(name, getattr(self, name), 0)
        if self.max_model_len is not None:
            _require_at_least("max_model_len", self.max_model_len, 2)
        if self.kv_cache_bytes is not None:
            _require_at_least("kv_cache_bytes", self.kv_cache_bytes, 1)
        for item in fields(self):
            if item.name.endswith("_timeout_s") and not 0 < getattr(self, item.name) < float("inf"):
                raise ValueError(
                    f"{item.name} must be a finite number of seconds > 0, got {getattr(self, item.name)}"
                )
        for name in self.engine_arguments:
            _refuse_argument(name)

    @property
    def engine_seed(self) -> int:
        """What this replica's own random state begins with, in [0, 2**31)."""
        return engine_seed(self.seed, self.replica)


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _refuse_argument(name: str) -> None:
    if name in OWN_ARGUMENTS:
        raise ValueError(f"engine_arguments has {name!r}; set {OWN_ARGUMENTS[name]} of the settings instead")
    if name in _FIXED:
        raise ValueError(f"engine_arguments has {name!r}, which is not free: tokens would not be exact")
    if name in _UNSCORABLE:
        raise ValueError(
            f"engine_arguments has {name!r}: the policy could not score what is sampled then; leave it out"
        )
