"""What the decode loop needs from a model: prompts in, then one token per row and call."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DecodeSession(Protocol):
    """A model with the key-value cache of one batch of ``B`` rows."""

    def prefill(self) -> Tensor:
        """Run the prompts; ``[B, V]`` logits of the token after each, in row order."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token per row (``[B]`` int64); ``[B, V]`` logits of the token after it."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these (``[B']`` int64 indices, ascending)."""
        ...
