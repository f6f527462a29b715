"""Decoding through the model's own forward pass and megatron's static inference context.

This works with every GPTModel, whatever its layers are, at two prices: the context has one offset for the
whole batch, so a batch holds prompts of one length only, and each step rotates all cached keys again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .planning import PromptBatch


class ContextSession:
    """One batch of prompts of equal length."""

    def __init__(self, model: Any, batch: PromptBatch, capacity: int, device: torch.device) -> None:
        """
        Args:
            model: a megatron-core GPTModel in eval mode.
            batch: its prompts have one length.
            capacity: the most tokens a row can hold.
            device: where the model lives.
        """
        from megatron.core.inference.contexts import StaticInferenceContext

        self._model = model
        self._batch = batch
        self._device = device
        self._context = StaticInferenceContext(len(batch.prompts), capacity)

    def prefill(self) -> Tensor:
        """See :class:`~rl_generation.megatron.session.DecodeSession`."""
        logits = self._forward(torch.tensor(self._batch.prompts, device=self._device))
        self._context.enable_decode_mode()
        owner = torch.repeat_interleave(torch.tensor(self._batch.counts, device=self._device))
        self.keep(owner)
        return logits[owner]

    def step(self, tokens: Tensor) -> Tensor:
        """See :class:`~rl_generation.megatron.session.DecodeSession`."""
        return self._forward(tokens[:, None])

    def keep(self, rows: Tensor) -> None:
        """See :class:`~rl_generation.megatron.session.DecodeSession`."""
        memory = self._context.key_value_memory_dict
        for layer, (keys, values) in memory.items():
            memory[layer] = (keys.index_select(1, rows), values.index_select(1, rows))
        self._context.max_batch_size = len(rows)

    def _forward(self, tokens: Tensor) -> Tensor:
        rows, columns = tokens.shape
        start = self._context.sequence_len_offset
        positions = torch.arange(start, start + columns, device=self._device).expand(rows, columns)
        logits = self._model(
            tokens, positions, None, inference_context=self._context, runtime_gather_output=True
        )
        self._context.increment_sequence_len_offset(columns)
        return logits[:, -1]
