"""Activation recompute: layers keep their input only, and are computed again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from .settings import Recompute


def recompute_config(recompute: Recompute) -> dict[str, Any]:
    """What megatron's ``TransformerConfig`` is told: every layer is a unit of its own."""
    if recompute == "none":
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def keep_layers_differentiable(model: torch.nn.Module) -> None:
    """Let gradients reach trained parts of layers although nothing before them is trained.

    A recomputed unit passes gradients on only if its input asks for one. The embedding's output
    does so when the embedding is trained; with adapters on frozen weights it would not.
    """
    # Absent from all pipeline stages but the first; the others' inputs always ask for gradients.
    embedding: Any = getattr(model, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
