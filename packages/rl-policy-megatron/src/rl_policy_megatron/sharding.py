"""How the tensors of a Hugging Face model lie over the ranks of a layout.

A tensor-parallel rank has rows or columns of a matrix: whole groups of query, key and value heads, its
part of gate and of up, its part of a vocabulary padded to equal parts. A pipeline stage has some of
the layers, an expert-parallel rank some of the experts, each numbered from 0 in megatron's names.
Cutting and joining only move whole blocks of numbers, so a round trip is exact to the bit. It all
serves anything that has a parameter's shape: weights, gradients, optimizer moments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .errors import PolicyError
from .mapping import Layout, WeightMap, WeightSpec
from .placement import Placement
from .vocabulary import VocabularyShard

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")


class TensorTable(Protocol):
    """The table between the tensors of a rank and those of the whole model, by saved names.

    :class:`WeightShards` is that of a model's own weights.
    """

    def fill(
        self, targets: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], source: object
    ) -> None: ...

    def gather(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]: ...

    def gather_stage(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What one parameter of this rank is of the whole model.

    Attributes:
        parameter: the table's name of it, numbered over the whole model.
        layout: how HF tensors lie inside it.
        dim: along which tensor-parallel ranks split it; None where each has all of it.
        of_vocabulary: whether its rows belong to tokens.
        of_expert: whether it is an expert's.
        is_copy: whether an earlier stage has it as well: the head of tied embeddings.
        shape: of the whole tensor.
        dtype: of the parameter.
    """

    parameter: str
    layout: Layout
    dim: int | None
    of_vocabulary: bool
    of_expert: bool
    is_copy: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter of the whole model: what it looks like, and who has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    expert_rank: int | None


class WeightShards:
    """The table of a model together with its layout. Making one is a collective over the model's ranks.

    Args:
        weight_map: the table.
        parameters: megatron's names and parameters of this rank, those that the table knows.
        placement: this rank's groups.

    Raises:
        PolicyError: megatron built other parameters than the table maps.
    """

    def __init__(
        self,
        weight_map: WeightMap,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        placement: Placement,
    ) -> None:
        self._map = weight_map
        self._placement = placement
        self._vocabulary = VocabularyShard(weight_map.shape.vocabulary, placement.tensor)
        self._pieces = {name: self._piece(name, parameter) for name, parameter in parameters}
        self._local_name = {piece.parameter: name for name, piece in self._pieces.items()}
        self._whole = self._meet()

    @property
    def specs(self) -> tuple[WeightSpec, ...]:
        """Names, shapes and types of all HF tensors, in the order of :meth:`gather`."""
        return tuple(
            WeightSpec(name, tuple(part.shape), whole.dtype)
            for parameter, whole in self._whole.items()
            for name, part in self._map.split(parameter, torch.empty(whole.shape, device="meta"))
        )

    @property
    def stage_hf_names(self) -> tuple[str, ...]:
        """The HF tensors that :meth:`gather_stage` yields here; over stages and expert ranks, each once."""
        return tuple(name for piece in self._stage() for name in self._map.entry(piece.parameter).hf_names)

    @property
    def writes_stage(self) -> bool:
        """Whether this rank is the one to write what :meth:`gather_stage` yields: others have the same."""
        return self._placement.tensor.first and self._placement.expert_data.first

    def fill(
        self,
        targets: Mapping[str, torch.Tensor],
        read: Callable[[str], torch.Tensor],
        source: object,
    ) -> None:
        """Write this rank's part of HF tensors into ``targets`` (megatron's local name → tensor).

        No collective: ``read`` is asked for whole tensors, and only for those that this rank has part of.

        Raises:
            ModelDirectoryError: a tensor of another shape than the model's; names both.
        """
        with torch.no_grad():
            for name, target in targets.items():
                piece = self._pieces[name]
                whole = self._map.merge_checked(piece.parameter, read, torch.Size(piece.shape), source)
                target.copy_(self._cut(piece, whole))

    def gather(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """All HF tensors of the model, whole, on every rank; ``named`` has this rank's, all of one type.

        A collective, one parameter at a time: every rank must iterate to the end. The order is the
        table's. Tensors may share memory with ``named``.
        """
        local = dict(named)
        dtype = next(iter(local.values())).dtype
        device = next(iter(local.values())).device
        pipeline, expert = self._placement.pipeline, self._placement.expert
        for parameter, whole in self._whole.items():
            name = self._local_name.get(parameter)
            has_it = name is not None and pipeline.rank == whole.stage
            if has_it and name is not None:
                tensor = self._join(self._pieces[name], local[name])
            else:
                tensor = torch.empty(whole.shape, dtype=dtype, device=device)
            if whole.expert_rank is not None and pipeline.rank == whole.stage:
                tensor = expert.broadcast(tensor, whole.expert_rank)
            yield from self._map.split(parameter, pipeline.broadcast(tensor, whole.stage))

    def gather_stage(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The HF tensors of this pipeline stage and, beyond the first expert rank, of its experts alone.

        A collective over the tensor-parallel ranks only.
        """
        local = dict(named)
        for piece in self._stage():
            tensor = self._join(piece, local[self._local_name[piece.parameter]])
            yield from self._map.split(piece.parameter, tensor)

    def _stage(self) -> list[Piece]:
        first = self._placement.expert.first
        return [piece for piece in self._pieces.values() if not piece.is_copy and (first or piece.of_expert)]

    def _piece(self, name: str, parameter: torch.nn.Parameter) -> Piece:
        shape, stages = self._map.shape, self._placement.pipeline
        first_layer = stages.rank * (shape.layers // stages.size)
        experts = 0 if shape.experts is None else shape.experts.count // self._placement.expert.size
        first_expert = self._placement.expert.rank * experts
        number = _LAYER.sub(lambda match: str(int(match[0]) + first_layer), name)
        number = _EXPERT.sub(lambda match: str(int(match[0]) + first_expert), number)
        is_copy = number == HEAD and shape.tied
        entry = self._map.entry(EMBEDDING if is_copy else number)
        split = getattr(parameter, "tensor_model_parallel", False)
        dim = int(getattr(parameter, "partition_dim", 0)) if split else None
        of_vocabulary = entry.parameter in (EMBEDDING, HEAD)
        sizes = list(parameter.shape)
        if of_vocabulary:
            sizes[0] = shape.vocabulary
        elif dim is not None:
            sizes[dim] *= self._placement.tensor.size
        return Piece(
            parameter=entry.parameter,
            layout=entry.layout,
            dim=dim,
            of_vocabulary=of_vocabulary,
            of_expert=_EXPERT.search(name) is not None,
            is_copy=is_copy,
            shape=tuple(sizes),
            dtype=parameter.dtype,
        )

    def _meet(self) -> dict[str, _Whole]:
        """All parameters of the model, in the table's order, from what each rank has."""
        found: dict[str, _Whole] = {}
        pipeline, expert = self._placement.pipeline, self._placement.expert
        own = [
            (
                piece.parameter,
                _Whole(piece.shape, piece.dtype, pipeline.rank, expert.rank if piece.of_expert else None),
            )
            for piece in self._pieces.values()
            if not piece.is_copy
        ]
        by_expert_rank = expert.gather_objects(own)
        twice: set[str] = set()
        for stage in pipeline.gather_objects(by_expert_rank):
            for rank in stage:  # type: ignore[attr-defined] (a list, as it was sent)
                times = Counter(parameter for parameter, _ in rank)
                # Under both of its spellings.
                twice.update(parameter for parameter, count in times.items() if count > 1)
                found.update(rank)
        odd = sorted((set(found) ^ set(self._map.parameters)) | twice)
        if odd:
            raise PolicyError(f"megatron-core built other parameters than this table maps: {', '.join(odd)}")
        return {parameter: found[parameter] for parameter in self._map.parameters}

    def _cut(self, piece: Piece, whole: torch.Tensor) -> torch.Tensor:
        ranks = self._placement.tensor
        if piece.dim is None or ranks.size == 1:
            return whole
        if piece.of_vocabulary:
            padding = whole.new_zeros(self._vocabulary.padded - len(whole), *whole.shape[1:])
            whole = torch.cat([whole, padding])
        halves = whole.chunk(2) if piece.layout is Layout.GATE_UP else (whole,)
        return torch.cat([half.chunk(ranks.size, piece.dim)[ranks.rank] for half in halves])

    def _join(self, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
        ranks = self._placement.tensor
        if piece.dim is None or ranks.size == 1:
            return tensor
        parts = ranks.gather(tensor)
        if piece.layout is Layout.GATE_UP:
            gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
            return torch.cat([*gates, *ups])
        whole = torch.cat(parts, piece.dim)
        return whole[: self._vocabulary.size] if piece.of_vocabulary else whole
