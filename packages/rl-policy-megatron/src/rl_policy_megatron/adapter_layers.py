"""What an adapter adds to the output of one of megatron's linears, on this rank's part of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .hf_config import ModelShape
from .lora import LoraSettings, Site, projection_sizes
from .mapping import Layout
from .mcore import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from .placement import Placement


class Pair(torch.nn.Module):
    """This rank's part of A and B of one projection."""

    def __init__(
        self,
        sizes: tuple[int, int],
        settings: LoraSettings,
        site: Site,
        placement: Placement,
        like: torch.Tensor,
    ) -> None:
        super().__init__()
        inputs, outputs = sizes
        ranks = placement.tensor
        if site.splits_outputs:
            outputs //= ranks.size
        else:
            inputs //= ranks.size
        self._ranks = ranks
        placed = {"dtype": like.dtype, "device": like.device}
        self.lora_A = torch.nn.Parameter(torch.empty(settings.rank, inputs, **placed))
        self.lora_B = torch.nn.Parameter(torch.zeros(outputs, settings.rank, **placed))
        split, whole = (self.lora_B, self.lora_A) if site.splits_outputs else (self.lora_A, self.lora_B)
        # What megatron reads: who has which part, and whose gradients are of some tokens only.
        if ranks.size > 1:
            _mark(split, tensor_model_parallel=True, partition_dim=split_dim(site), partition_stride=1)
            _mark(whole, sequence_parallel=placement.sequence_parallel)

    def draw(self, generator: torch.Generator) -> None:
        # As a linear layer is initialised; B stays zero, so that training starts at the base itself.
        rank, inputs = self.lora_A.shape
        split = getattr(self.lora_A, "tensor_model_parallel", False)
        inputs *= self._ranks.size if split else 1
        bound = 1 / math.sqrt(inputs)
        # The whole matrix on every rank: its numbers do not depend on the layout.
        drawn = torch.empty(rank, inputs, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            self.lora_A.copy_(drawn.chunk(self._ranks.size, 1)[self._ranks.rank] if split else drawn)


def split_dim(site: Site) -> int:
    """Along which tensor-parallel ranks split the half of a pair that they do not have whole."""
    return 0 if site.splits_outputs else 1


def _mark(parameter: Any, **marks: Any) -> None:
    for name, value in marks.items():
        setattr(parameter, name, value)


class Adapter(torch.nn.Module):
    """What is added to the output of one of megatron's linears."""

    def __init__(
        self,
        site: Site,
        shape: ModelShape,
        settings: LoraSettings,
        placement: Placement,
        like: torch.Tensor,
    ) -> None:
        super().__init__()
        self.site = site
        self._scale = settings.scale
        self._split = placement.tensor.size > 1
        self._sequence_parallel = placement.sequence_parallel
        parts = placement.tensor.size if site.splits_outputs else 1
        self._groups, self._width = shape.kv_heads // parts, shape.head_dim
        sizes = {projection: projection_sizes(projection, shape) for projection in site.projections}
        self._outputs = {projection: outputs // parts for projection, (_, outputs) in sizes.items()}
        for projection in site.projections:
            if projection in settings.targets:
                self.add_module(projection, Pair(sizes[projection], settings, site, placement, like))
        # The reference's pairs; none at all means the base without adapters.
        self.frozen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.uses_frozen = False

    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """This rank's A and B by projection, those that are trained."""
        modules: Iterable[tuple[str, Any]] = self.named_children()
        return {projection: (pair.lora_A, pair.lora_B) for projection, pair in modules}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """``[S, B, in]`` → ``[S, B, out]`` in megatron's order of outputs; None if nothing is added.

        Both are this rank's: of the inputs, outputs and tokens that the linear has here.
        """
        pairs = self.frozen if self.uses_frozen else self.pairs()
        if not pairs:
            return None
        parts: dict[str, torch.Tensor] = {}
        for projection, (down, up) in pairs.items():
            parts[projection] = self._met(inputs @ down.t() * self._scale) @ up.t()
        like = next(iter(parts.values()))
        ordered = [
            parts[projection] if projection in parts else like.new_zeros(*like.shape[:-1], outputs)
            for projection, outputs in self._outputs.items()
        ]
        if self.site.layout is Layout.QKV:
            blocks = [part.reshape(*part.shape[:-1], self._groups, -1, self._width) for part in ordered]
            return torch.cat(blocks, dim=-2).flatten(-3)
        return torch.cat(ordered, dim=-1)

    def _met(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[S, B, rank]`` between A and B, where tensor-parallel ranks meet, here and in the backward pass.

        Where they split the outputs each has all inputs, or with sequence parallelism all those of its
        tokens, and a share of the gradient; where they split the inputs each has a share of the sum.
        """
        if not self._split:
            return hidden
        if self.site.splits_outputs:
            if self._sequence_parallel:
                return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            return copy_to_tensor_model_parallel_region(hidden)
        if self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden)
        return reduce_from_tensor_model_parallel_region(hidden)
