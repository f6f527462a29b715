"""What is asked of vLLM's configuration once it is there, and how prompts are given to it."""

from __future__ import annotations

from typing import Any

from ..failures import GenerationError
from .driver import Launched


def require_unquantised(config: Any, component: str) -> None:
    """Refuse a checkpoint whose arithmetic is not the policy's.

    Raises:
        GenerationError: it is quantised.
    """
    found = config.model_config.quantization
    if found is not None:
        raise GenerationError(
            f"{component}: the checkpoint is quantised ({found}), so what it samples could be neither scored "
            "by the policy nor renewed by a refit; use an unquantised one"
        )


def facts_of(config: Any, pid: int, processes: tuple[int, ...]) -> Launched:
    """Read from vLLM's configuration as it is after the model was loaded."""
    model = config.model_config
    return Launched(
        max_context=int(model.max_model_len),
        vocab_size=int(model.get_vocab_size()),
        tied=bool(getattr(model.hf_config, "tie_word_embeddings", False)),
        pid=pid,
        processes=processes,
    )


def prompt_of(token_ids: tuple[int, ...]) -> Any:
    """Tokens as vLLM takes them without looking for a text or a thread to work on it."""
    try:
        from vllm.inputs import tokens_input
    except ImportError:
        from vllm import TokensPrompt

        return TokensPrompt(prompt_token_ids=list(token_ids))
    return tokens_input(list(token_ids))
