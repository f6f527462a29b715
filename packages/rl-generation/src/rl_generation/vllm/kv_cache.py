"""How large a key-value cache must at least be: vLLM says it only once it has loaded, in a log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model_dtype import resolved_dtype
from .arguments import CPU_KV_CACHE_BYTES
from .settings import VllmSettings

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# vLLM's own defaults; some GPU kernels take more, never less.
_BLOCK = {True: 128, False: 16}
# Of attention that keeps something else than every key and value.
_OTHER_CACHES = ("kv_lora_rank", "sliding_window", "linear_num_key_heads", "mamba_d_state", "ssm_state_size")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Of a model whose layers all keep every key and value.

    Attributes:
        layers: with attention.
        kv_heads: of each.
        head_dim: numbers in a key, and as many in a value.
        context: the most tokens that the model knows.
    """

    layers: int
    kv_heads: int
    head_dim: int
    context: int


def cache_shape(model_dir: Path | str) -> CacheShape | None:
    """From ``config.json``; ``None`` where it does not say, or says of layers that keep something else."""
    try:
        config: Any = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        if _keeps_something_else(config):
            return None
        heads = int(config["num_attention_heads"])
        return CacheShape(
            layers=int(config["num_hidden_layers"]),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            context=int(config["max_position_embeddings"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def least_kv_cache_bytes(settings: VllmSettings, shape: CacheShape, *, cpu: bool) -> int | None:
    """Bytes in which each process of the engine can keep one request of the longest context.

    ``2 · layers · kv_heads · head_dim · bytes`` for each token, in whole blocks, the heads shared out over
    the tensor-parallel processes; and one block more, which vLLM keeps back.

    Args:
        settings: of the engine.
        shape: of its model.
        cpu: whether this vLLM is one for CPUs.

    Returns:
        ``None`` where the type of the weights is unknown, or vLLM is told the number of blocks itself.
    """
    number = _BYTES.get(resolved_dtype(settings.dtype, settings.model_dir))
    block = settings.engine_arguments.get("block_size") or _BLOCK[cpu]
    counted = "num_gpu_blocks_override" in settings.engine_arguments
    if number is None or counted or not isinstance(block, int) or block < 1:
        return None
    tokens = settings.max_model_len or shape.context
    heads = max(1, shape.kv_heads // settings.tensor_parallel_size)
    blocks = -(-tokens // block) + 1
    return blocks * block * 2 * shape.layers * heads * shape.head_dim * number


def cache_fault(settings: VllmSettings, shape: CacheShape | None, *, cpu: bool) -> str | None:
    """What is wrong with ``kv_cache_bytes``, ``None`` if nothing that can be told.

    Args:
        settings: of the engine.
        shape: of its model; ``None`` is unknown.
        cpu: whether this vLLM is one for CPUs.
    """
    given = settings.kv_cache_bytes or (CPU_KV_CACHE_BYTES if cpu else None)
    least = None if shape is None else least_kv_cache_bytes(settings, shape, cpu=cpu)
    if shape is None or given is None or least is None or given >= least:
        return None
    what = f"{given}" if settings.kv_cache_bytes else f"{given}, the default on a CPU,"
    tokens = settings.max_model_len or shape.context
    return (
        f"{what} is too small for one request of {tokens} tokens; give at least {least}, or lower "
        "max_model_len"
    )


def _keeps_something_else(config: Mapping[str, Any]) -> bool:
    layers = config.get("layer_types") or ()
    slides = config.get("use_sliding_window", True)
    return any(kind != "full_attention" for kind in layers) or any(
        config.get(name) for name in _OTHER_CACHES if name != "sliding_window" or slides
    )
