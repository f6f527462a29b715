"""One transformer layer, cut open where attention goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import direct


class LayerArithmetic:
    """What a plain layer does before and after attention, for ``n`` tokens at once.

    Args:
        layer: a megatron ``TransformerLayer`` that :func:`~.inspection.why_not_by_layers` has nothing
            against.
    """

    def __init__(self, layer: Any) -> None:
        self._input_norm = direct.norm(layer.input_layernorm)
        self._heads = _heads(layer.self_attention)
        self._output = direct.linear(layer.self_attention.linear_proj)
        self._mlp_norm = direct.norm(layer.pre_mlp_layernorm)
        self._mlp = direct.mlp(layer.mlp)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Split ``[n, h]`` hidden states into heads, before rotation.

        Returns:
            ``[n, G, Q + 1, D]``: for each of the ``G`` key-value heads its ``Q`` queries and, last, its
            key; and the values ``[n, G, D]``.
        """
        return self._heads(self._input_norm(hidden))

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output ``[n, h]`` from its input and from what attention made (``[n, G * Q * D]``)."""
        hidden = hidden + self._output(mixed)
        return hidden + self._mlp(self._mlp_norm(hidden))


def _heads(attention: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    project = direct.linear(attention.linear_qkv)
    groups = attention.num_query_groups_per_partition
    width = attention.hidden_size_per_attention_head
    queries = attention.num_attention_heads_per_partition // groups
    normalise = _head_norm(attention.q_layernorm, attention.k_layernorm, queries)

    def heads(tokens: Tensor) -> tuple[Tensor, Tensor]:
        # Megatron's projection holds, for each key-value head in turn, its queries, its key and its value.
        both = project(tokens).view(len(tokens), groups, queries + 2, width)
        return normalise(both[:, :, :-1]), both[:, :, -1]

    return heads


def _head_norm(query_norm: Any, key_norm: Any, queries: int) -> direct.Arithmetic:
    """Norms of ``queries`` query heads and of the key head after them, along the last but one dimension."""
    if query_norm is None and key_norm is None:
        return direct.norm(None)
    composed = direct.is_composed_rms_norm(query_norm) and direct.is_composed_rms_norm(key_norm)
    if composed and query_norm.eps == key_norm.eps:
        weight = torch.stack([query_norm.weight] * queries + [key_norm.weight])
        return direct.rms_norm(weight, query_norm.eps)
    of_queries, of_keys = direct.norm(query_norm), direct.norm(key_norm)
    return lambda x: torch.cat((of_queries(x[:, :, :-1]), of_keys(x[:, :, -1:])), dim=2)
