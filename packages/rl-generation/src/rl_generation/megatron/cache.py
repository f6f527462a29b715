"""Rotated keys and values of one batch, laid out for attention."""

from __future__ import annotations

import torch
from torch import Tensor

# Room beyond the prompts is taken in steps, so that a generous max_new_tokens costs memory only when used.
_FIRST_ROOM = 64


class KeyValueCache:
    """Per layer ``[B, H, C, D]`` keys and values: ``B`` rows, ``H`` key-value heads, ``C`` columns.

    A prompt fills the first columns of its row. The tokens that follow share one column per step, the first
    of them after the longest prompt; :attr:`bias` hides the columns between.
    """

    def __init__(self, lengths: Tensor, longest: int, limit: int, dtype: torch.dtype) -> None:
        """
        Args:
            lengths: ``[B]`` prompt lengths.
            longest: the largest of them.
            limit: the most columns that will be needed.
            dtype: of queries, which the bias has to match.
        """
        self._longest = longest
        self._limit = limit
        self._columns = min(longest + _FIRST_ROOM, limit)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = len(lengths)
        self.used = longest
        self._bias: Tensor | None = None
        if int(lengths.min()) < longest:
            column = torch.arange(limit, device=lengths.device)
            gap = (column >= lengths[:, None]) & (column < longest)
            bias = torch.zeros(gap.shape, dtype=dtype, device=lengths.device)
            self._bias = bias.masked_fill_(gap, float("-inf"))[:, None, None, :]

    def bias(self) -> Tensor | None:
        """``[B, 1, 1, used]``, 0 or ``-inf``, to add to attention scores; ``None`` when no row has a gap."""
        return None if self._bias is None else self._bias[..., : self.used]

    def put_prompts(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store the prompts of consecutive rows: ``[b, H, S, D]`` from row ``start`` and column 0 on."""
        rows, heads, length, width = keys.shape
        if layer not in self._layers:
            shape = (self._rows, heads, self._columns, width)
            self._layers[layer] = (keys.new_empty(shape), values.new_empty((*shape[:3], values.shape[3])))
        for cached, new in zip(self._layers[layer], (keys, values), strict=True):
            cached[start : start + rows, :, :length] = new
            # Hidden columns still go through the products, where a leftover NaN would spread.
            cached[start : start + rows, :, length : self._longest] = 0

    def advance(self) -> None:
        """Open the column of the next token."""
        if self.used == self._columns:
            self._columns = min(self._columns * 2, self._limit)
            for layer, pair in self._layers.items():
                keys, values = (self._widened(cached) for cached in pair)
                self._layers[layer] = (keys, values)
        self.used += 1

    def put_tokens(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token per row (``[B, H, D]``) in the open column; all keys and values up to it."""
        cached_keys, cached_values = self._layers[layer]
        cached_keys[:, :, self.used - 1] = keys
        cached_values[:, :, self.used - 1] = values
        return cached_keys[:, :, : self.used], cached_values[:, :, : self.used]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these (``[B']`` indices)."""
        self._rows = len(rows)
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (keys.index_select(0, rows), values.index_select(0, rows))
        if self._bias is not None:
            self._bias = self._bias.index_select(0, rows)

    def _widened(self, cached: Tensor) -> Tensor:
        rows, heads, _, width = cached.shape
        wider = cached.new_empty((rows, heads, self._columns, width))
        wider[:, :, : self.used] = cached
        return wider
