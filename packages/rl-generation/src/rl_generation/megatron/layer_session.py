"""Decoding through the model's own modules, layer by layer, around our own key-value cache.

The projections, norms and MLPs that run are the model's. What is left out is what megatron's forward pass
does in each step without need: it rotates every cached key again, ties all rows to one offset, and enters
and leaves scopes of features that are off. Attention is computed here, so that what the model's core
attention makes of masks and cached keys does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KeyValueCache
from .planning import PromptBatch
from .rotary import RotaryTable, rotate

# Prompts are run in chunks of about this many tokens, to bound the memory of activations.
PREFILL_TOKENS = 32768


class LayerSession:
    """One batch of prompts of any lengths."""

    def __init__(self, model: Any, batch: PromptBatch, capacity: int, device: torch.device) -> None:
        """
        Args:
            model: a GPTModel in eval mode that :func:`~.inspection.why_not_by_layers` has nothing against.
            batch: the prompts.
            capacity: the longest prompt plus the most tokens that may follow one.
            device: where the model lives.
        """
        self._model = model
        self._layers = list(model.decoder.layers)
        self._batch = batch
        self._device = device
        self._scale = model.config.softmax_scale or model.config.kv_channels**-0.5
        dtype = model.embedding.word_embeddings.weight.dtype
        self._table = RotaryTable(model.rotary_pos_emb, capacity, dtype, device)
        lengths = torch.tensor([len(p) for p in batch.prompts], device=device)
        self._positions = lengths.repeat_interleave(torch.tensor(batch.counts, device=device))
        self._cache = KeyValueCache(self._positions, batch.longest_prompt, capacity, dtype)

    def prefill(self) -> Tensor:
        """See :class:`~rl_generation.megatron.session.DecodeSession`."""
        logits = []
        start = 0
        for chunk in _chunks(self._batch.prompts):
            counts = torch.tensor(self._batch.counts[chunk], device=self._device)
            owner = torch.repeat_interleave(counts)
            logits.append(self._prefill_chunk(self._batch.prompts[chunk], owner, start)[owner])
            start += len(owner)
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:
        """See :class:`~rl_generation.megatron.session.DecodeSession`."""
        hidden = self._model.embedding(tokens[:, None], self._positions[:, None])
        cosines, sines = self._table.at(self._positions)
        self._cache.advance()
        bias = self._cache.bias()
        for index, layer in enumerate(self._layers):
            query, key, value = _project(layer, hidden)
            heads, groups = query.shape[2], key.shape[2]
            rotated = rotate(torch.cat((query[0], key[0]), dim=1), cosines, sines)
            keys, values = self._cache.put_tokens(index, rotated[:, heads:], value[0])
            # The query heads of one key-value head look at the same keys: to attention they are its queries.
            query = rotated[:, :heads].unflatten(1, (groups, heads // groups))
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=self._scale)
            hidden = _finish(layer, hidden, mixed.reshape(1, len(tokens), -1))
        self._positions = self._positions + 1
        return self._logits(hidden)

    def keep(self, rows: Tensor) -> None:
        """See :class:`~rl_generation.megatron.session.DecodeSession`."""
        self._cache.keep(rows)
        self._positions = self._positions[rows]

    def _prefill_chunk(self, prompts: tuple[tuple[int, ...], ...], owner: Tensor, start: int) -> Tensor:
        """Run distinct prompts and store them for the rows from ``start`` on; logits ``[len(prompts), V]``.

        Prompts are padded on the right, where causal attention never looks.
        """
        length = len(prompts[-1])
        tokens = torch.tensor([[*p, *[0] * (length - len(p))] for p in prompts], device=self._device)
        hidden = self._model.embedding(tokens, torch.arange(length, device=self._device).expand_as(tokens))
        cosines, sines = self._table.first(length)
        for index, layer in enumerate(self._layers):
            query, key, value = _project(layer, hidden)
            query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
            query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            self._cache.put_prompts(index, start, key[owner], value[owner])
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=True
            )
            hidden = _finish(layer, hidden, mixed.permute(2, 0, 1, 3).flatten(2))
        ends = torch.tensor([len(p) - 1 for p in prompts], device=self._device)
        return self._logits(hidden[ends, torch.arange(len(prompts), device=self._device)][None])

    def _logits(self, hidden: Tensor) -> Tensor:
        """``[b, V]`` logits of ``[1, b, h]`` hidden states."""
        model = self._model
        weight = (
            model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        )
        norm = model.decoder.final_layernorm
        logits, _ = model.output_layer(
            hidden if norm is None else norm(hidden), weight=weight, runtime_gather_output=True
        )
        return logits[0]


def _project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[s, b, heads, D]`` of ``[s, b, h]`` hidden states."""
    return layer.self_attention.get_query_key_value_tensors(layer.input_layernorm(hidden), None)


def _finish(layer: Any, hidden: Tensor, mixed: Tensor) -> Tensor:
    """The rest of a layer after attention; megatron's linear layers hand their bias back separately."""
    out, bias = layer.self_attention.linear_proj(mixed)
    hidden = hidden + (out if bias is None else out + bias)
    out, bias = layer.mlp(layer.pre_mlp_layernorm(hidden))
    return hidden + (out if bias is None else out + bias)


def _chunks(prompts: tuple[tuple[int, ...], ...]) -> Iterator[slice]:
    """Slices of prompts, shortest first, that hold about :data:`PREFILL_TOKENS` tokens once padded."""
    first = 0
    for last in range(1, len(prompts) + 1):
        full = last == len(prompts) or (last + 1 - first) * len(prompts[last]) > PREFILL_TOKENS
        if full:
            yield slice(first, last)
            first = last
