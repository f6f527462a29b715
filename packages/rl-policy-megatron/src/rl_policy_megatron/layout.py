"""How one policy is laid over the ranks of a world: tensors, layers, experts, and rows."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RuntimeStateError


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the groups that share one model's work; what is left of the world takes rows.

    Attributes:
        tensor: ranks that split every matrix among them, ≥ 1.
        pipeline: ranks that split the layers among them, ≥ 1.
        expert: data-parallel ranks that split the experts of a mixture among them, ≥ 1.
        sequence_parallel: whether the ranks of a tensor group also split the tokens between the
            matrices; saves memory for activations. Needs ``tensor`` > 1.

    Raises:
        ValueError: a size below 1, or sequence parallelism without tensor parallelism.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"layout.{name} must be an integer of at least 1, got {size!r}")
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("layout.sequence_parallel needs layout.tensor of at least 2, got 1")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense part of the model."""
        return self.tensor * self.pipeline

    def data(self, world: int) -> int:
        """Number of data-parallel ranks in a world of ``world`` processes.

        Raises:
            RuntimeStateError: the world is no multiple of tensor · pipeline, or its data-parallel
                ranks no multiple of expert.
        """
        if world % self.model_ranks:
            raise RuntimeStateError(
                f"a world of {world} processes cannot hold a layout of tensor {self.tensor} x pipeline "
                f"{self.pipeline}; start a multiple of {self.model_ranks} processes"
            )
        data = world // self.model_ranks
        if data % self.expert:
            raise RuntimeStateError(
                f"a world of {world} processes has {data} data-parallel ranks, which cannot split experts "
                f"{self.expert} ways; start a multiple of {self.model_ranks * self.expert} processes"
            )
        return data
