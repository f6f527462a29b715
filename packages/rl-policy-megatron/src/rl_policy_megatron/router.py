"""Which experts a token goes through, decided as transformers decides it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .mcore import TopKRouter


class SoftmaxRouter(TopKRouter):
    """megatron's router with the arithmetic of the models' own implementation.

    Logits are computed in the type of the weights, their softmax over all experts in float32, and
    the weights of the chosen experts are rounded to the type of the logits. Engines that sample do
    the same, and a token that went through other experts when it is scored has another probability.
    megatron's own variants differ in the order of rounding, and need Transformer Engine by name.
    """

    def __init__(self, *args: Any, renormalise: bool, **kwargs: Any) -> None:
        """
        Args:
            renormalise: whether the weights of a token's experts are made to sum to 1.
        """
        super().__init__(*args, **kwargs)
        self._renormalise = renormalise

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[S, B, H]`` → weights ``[S · B, E]``, 0 for experts not chosen, and the choice as bool."""
        logits = F.linear(input, self.weight).flatten(0, 1)
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self.topk, dim=-1)
        if self._renormalise and self.topk == 1:
            # The quotient is 1 and its gradient 0, but for a rounding error that AdamW would magnify.
            weights = torch.ones_like(weights)
        elif self._renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype)), chosen
