"""Decoding layer by layer, with the model's own weights, around our own key-value cache.

What is left out is what megatron's forward pass does in each step without need: it rotates every cached key
again, ties all rows to one offset, and enters and leaves scopes of features that are off. Attention is
computed here, so that what the model's core attention makes of masks and cached keys does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import direct
from .cache import KeyValueCache
from .layer_arithmetic import LayerArithmetic
from .planning import PromptBatch
from .rotary import RotaryTable, rotate

# Prompts are run in chunks of about this many tokens, to bound the memory of activations.
PREFILL_TOKENS = 32768


class LayerSession:
    """One batch of prompts of any lengths. It must not outlive a change of the weights."""

    def __init__(self, model: Any, batch: PromptBatch, capacity: int, device: torch.device) -> None:
        """
        Args:
            model: a GPTModel in eval mode that :func:`~.inspection.why_not_by_layers` has nothing against.
            batch: the prompts.
            capacity: the longest prompt plus the most tokens that may follow one.
            device: where the model lives.
        """
        tied = model.share_embeddings_and_output_weights
        self._embed = direct.embedding(model.embedding)
        self._layers = [LayerArithmetic(layer) for layer in model.decoder.layers]
        self._final_norm = direct.norm(model.decoder.final_layernorm)
        self._head = direct.linear(
            model.output_layer, model.shared_embedding_or_output_weight() if tied else None
        )
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
        hidden = self._embed(tokens[:, None], self._positions[:, None])
        cosines, sines = self._table.at(self._positions)
        self._cache.advance()
        bias = self._cache.bias()
        for index, layer in enumerate(self._layers):
            heads, values = layer.project(hidden)
            heads = rotate(heads, cosines, sines)
            keys, values = self._cache.put_tokens(index, heads[:, :, -1], values)
            # The query heads of one key-value head look at the same keys: to attention they are its queries.
            mixed = F.scaled_dot_product_attention(
                heads[:, :, :-1], keys, values, attn_mask=bias, scale=self._scale
            )
            hidden = layer.finish(hidden, mixed.reshape(len(tokens), -1))
        self._positions = self._positions + 1
        return self._head(self._final_norm(hidden))

    def keep(self, rows: Tensor) -> None:
        """See :class:`~rl_generation.megatron.session.DecodeSession`."""
        self._cache.keep(rows)
        self._positions = self._positions[rows]

    def _prefill_chunk(self, prompts: tuple[tuple[int, ...], ...], owner: Tensor, start: int) -> Tensor:
        """Run distinct prompts and store them for the rows from ``start`` on; logits ``[len(prompts), V]``.

        Prompts are padded on the right, where causal attention never looks.
        """
        rows, length = len(prompts), len(prompts[-1])
        tokens = torch.tensor([[*p, *[0] * (length - len(p))] for p in prompts], device=self._device)
        positions = torch.arange(length, device=self._device).expand_as(tokens)
        hidden = self._embed(tokens, positions)
        cosines, sines = self._table.first(length)
        ends = torch.tensor([row * length + len(p) - 1 for row, p in enumerate(prompts)], device=self._device)
        for index, layer in enumerate(self._layers):
            heads, values = (x.unflatten(0, (rows, length)) for x in layer.project(hidden))
            heads = rotate(heads, cosines, sines)
            query = heads[:, :, :, :-1].flatten(2, 3).transpose(1, 2)
            key, value = heads[:, :, :, -1].transpose(1, 2), values.transpose(1, 2)
            self._cache.put_prompts(index, start, key[owner], value[owner])
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=True
            )
            mixed = mixed.transpose(1, 2).reshape(rows * length, -1)
            if index == len(self._layers) - 1:
                # Nothing looks at the other tokens any more.
                hidden, mixed = hidden[ends], mixed[ends]
            hidden = layer.finish(hidden, mixed)
        return self._head(self._final_norm(hidden))


def _chunks(prompts: tuple[tuple[int, ...], ...]) -> Iterator[slice]:
    """Slices of prompts, shortest first, that hold about :data:`PREFILL_TOKENS` tokens once padded."""
    first = 0
    for last in range(1, len(prompts) + 1):
        full = last == len(prompts) or (last + 1 - first) * len(prompts[last]) > PREFILL_TOKENS
        if full:
            yield slice(first, last)
            first = last
