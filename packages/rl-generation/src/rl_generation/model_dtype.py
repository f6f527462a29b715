"""The type that a checkpoint's weights have, by its own word: engines read their ``auto`` in other ways."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .failures import RefitError
from .refit.checkpoint import spec_of_checkpoint

_KNOWN = frozenset({"float32", "bfloat16", "float16"})


def resolved_dtype(wanted: str, model_dir: Path | str) -> str:
    """``wanted``, and for ``auto`` the checkpoint's type.

    vLLM and TensorRT-LLM read ``auto`` as half the precision where a checkpoint is in float32: it would be
    sampled with other weights than the policy's.

    Args:
        wanted: torch's name without the prefix, or ``auto``.
        model_dir: folder of a model in HF layout.

    Returns:
        Torch's name without the prefix; ``auto`` where the folder does not say.
    """
    return checkpoint_dtype(model_dir) or wanted if wanted == "auto" else wanted


def checkpoint_dtype(model_dir: Path | str) -> str | None:
    """What ``config.json`` names, else the type of most of the numbers in the safetensors files.

    Args:
        model_dir: folder of a model in HF layout.

    Returns:
        Torch's name without the prefix, ``None`` where neither says one that a policy could have.
    """
    named = _named(Path(model_dir) / "config.json")
    if named is not None:
        return named if named in _KNOWN else None
    try:
        tensors = spec_of_checkpoint(model_dir).tensors
    except RefitError:
        return None
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        size = 1
        for length in tensor.shape:
            size *= length
        numbers[str(tensor.dtype).removeprefix("torch.")] += size
    commonest = numbers.most_common(1)
    return commonest[0][0] if commonest and commonest[0][0] in _KNOWN else None


def _named(file: Path) -> str | None:
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        if isinstance(part, dict):
            # The latter is its name before transformers 5.
            for name in ("dtype", "torch_dtype"):
                if isinstance(part.get(name), str):
                    return part[name].removeprefix("torch.")
    return None
