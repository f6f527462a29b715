"""What a model's folder says about it, without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..failures import RequestError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """From ``config.json``.

    Attributes:
        vocab_size: token ids lie below it.
        longest_context: positions that the model knows, ``None`` where the file does not say.
        head_is_tied: whether the output layer is the embedding.
    """

    vocab_size: int
    longest_context: int | None
    head_is_tied: bool


def model_facts(folder: Path) -> ModelFacts:
    """Read ``config.json``.

    Raises:
        RequestError: it is missing or has no vocabulary.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        inner = config.get("text_config") or config
        longest = inner.get("max_position_embeddings")
        tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))
        return ModelFacts(int(inner["vocab_size"]), None if longest is None else int(longest), bool(tied))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"TensorRT-LLM: {path} does not describe a model ({type(error).__name__}: {error}); give the "
            "local folder of a model in HF layout"
        ) from error
