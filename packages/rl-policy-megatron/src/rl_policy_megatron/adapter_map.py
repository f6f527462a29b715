"""The table between saved names and megatron's names of adapters, as WeightShards is for weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from .adapter_layers import split_dim
from .hf_config import ModelShape
from .lora import SITES, LoraSettings, projection_sizes
from .mapping import WeightSpec
from .placement import Placement


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the whole model.

    Attributes:
        parameter: megatron's name of it on the ranks that have it.
        stage: of the pipeline, whose ranks these are.
        dim: along which tensor-parallel ranks split it; None where each has all of it.
        shape: of the whole.
    """

    parameter: str
    stage: int
    dim: int | None
    shape: tuple[int, int]


class AdapterMap:
    """How the tensors of adapters, named ``{projection}.lora_A.weight``, lie over the ranks of a layout."""

    def __init__(
        self, shape: ModelShape, settings: LoraSettings, dtype: torch.dtype, placement: Placement
    ) -> None:
        self._placement = placement
        self._entries: dict[str, _Entry] = {}
        layers = shape.layers // placement.pipeline.size
        for number in range(shape.layers):
            for site in SITES:
                for projection in site.projections:
                    if projection not in settings.targets:
                        continue
                    inputs, outputs = projection_sizes(projection, shape)
                    sizes = {"lora_A": (settings.rank, inputs), "lora_B": (outputs, settings.rank)}
                    split = "lora_B" if site.splits_outputs else "lora_A"
                    for part, size in sizes.items():
                        self._entries[f"{site.hf_name(number, projection)}.{part}.weight"] = _Entry(
                            parameter_name(number % layers, site.linear, projection, part),
                            number // layers,
                            split_dim(site) if part == split else None,
                            size,
                        )
        self.specs = {name: WeightSpec(name, entry.shape, dtype) for name, entry in self._entries.items()}
        here = placement.pipeline.rank
        self._saved = {e.parameter: name for name, e in self._entries.items() if e.stage == here}

    def fill(
        self, targets: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], source: object
    ) -> None:
        """Copy this rank's part of saved tensors into ``targets`` (megatron's name → tensor)."""
        with torch.no_grad():
            for parameter, target in targets.items():
                target.copy_(self.cut(self._saved[parameter], read))

    def cut(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """This rank's part of the saved tensor of that name."""
        ranks, dim = self._placement.tensor, self._entries[name].dim
        whole = read(name)
        return whole if dim is None else whole.chunk(ranks.size, dim)[ranks.rank]

    def gather(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the model under their saved names, whole, on every rank.

        A collective, one at a time: every rank must iterate to the end.
        """
        local = dict(named)
        for name in self._entries:
            yield name, self.whole(name, local)

    def gather_stage(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of this pipeline stage, from one group of experts. A collective of tensor-parallel ranks."""
        if not self._placement.expert.first:
            return
        for parameter, tensor in named:
            name = self._saved[parameter]
            yield name, self._join(name, tensor)

    def whole(self, name: str, local: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One tensor from this rank's ``local`` ones, by megatron's names. A collective of all ranks."""
        entry, pipeline = self._entries[name], self._placement.pipeline
        if entry.stage == pipeline.rank:
            tensor = self._join(name, local[entry.parameter])
        else:
            like = next(iter(local.values()))
            tensor = torch.empty(entry.shape, dtype=like.dtype, device=like.device)
        return pipeline.broadcast(tensor, entry.stage)

    def _join(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        ranks, dim = self._placement.tensor, self._entries[name].dim
        return tensor if dim is None or ranks.size == 1 else torch.cat(ranks.gather(tensor), dim)


def parameter_name(layer: int, linear: str, projection: str, part: str) -> str:
    """Megatron's name of one tensor, its layer numbered within the stage."""
    return f"decoder.layers.{layer}.{linear}.adapter.{projection}.{part}"
