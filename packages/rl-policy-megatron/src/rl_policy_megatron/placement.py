"""Where this process stands in the groups of a layout, and what the members of a group do together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import RuntimeStateError
from .layout import ParallelLayout
from .mcore import parallel_state


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Processes that meet in collectives; every member must make the same calls in the same order.

    A group of one does nothing, so callers need no case of their own for it.

    Attributes:
        rank: this process's number in the group.
        size: how many members there are.
        group: of torch.distributed; None is the whole world.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> RankGroup:
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the members, in place and returned."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of the members' values at each place, in place and returned."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The members' tensors by rank; all must have the same shape and type."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """What member ``source`` has, written into the others' tensors, and returned."""
        if self.size > 1:
            tensor = tensor.contiguous()
            place = source if self.group is None else dist.get_global_rank(self.group, source)
            dist.broadcast(tensor, src=place, group=self.group)
        return tensor

    def gather_objects(self, value: object) -> list[object]:
        """The members' values by rank; pickled on the way from one process of the group to the other."""
        values: list[object] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, op=operation, group=self.group)
        return tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """One process's groups; the default is a world of one.

    Attributes:
        world: everyone.
        tensor: splits each matrix.
        pipeline: splits the layers, first to last.
        data: splits the rows.
        expert: splits the experts; a part of ``data``, or of several such.
        expert_data: holds the same experts.
        sequence_parallel: whether ``tensor`` also splits the tokens.
    """

    world: RankGroup = RankGroup()
    tensor: RankGroup = RankGroup()
    pipeline: RankGroup = RankGroup()
    data: RankGroup = RankGroup()
    expert: RankGroup = RankGroup()
    expert_data: RankGroup = RankGroup()
    sequence_parallel: bool = False

    @classmethod
    def current(cls, layout: ParallelLayout) -> Placement:
        """From megatron's groups of this process.

        Raises:
            RuntimeStateError: they were made for another layout.
        """
        placement = cls(
            world=RankGroup.of(None),
            tensor=RankGroup.of(parallel_state.get_tensor_model_parallel_group()),
            pipeline=RankGroup.of(parallel_state.get_pipeline_model_parallel_group()),
            data=RankGroup.of(parallel_state.get_data_parallel_group()),
            expert=RankGroup.of(parallel_state.get_expert_model_parallel_group()),
            expert_data=RankGroup.of(parallel_state.get_expert_data_parallel_group()),
            sequence_parallel=layout.sequence_parallel,
        )
        found = (placement.tensor.size, placement.pipeline.size, placement.expert.size)
        wanted = (layout.tensor, layout.pipeline, layout.expert)
        if found != wanted:
            raise RuntimeStateError(
                f"megatron's groups of this process are laid out as (tensor, pipeline, expert) = {found}, "
                f"this policy asks for {wanted}; policies of one process share one layout"
            )
        return placement

    @property
    def speaks(self) -> bool:
        """Whether this process reports for its rows: the last stage has results, and one copy is enough."""
        return self.pipeline.last and self.tensor.first
