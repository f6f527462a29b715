"""How one policy is laid over the ranks of a world: tensors, layers, experts, and rows."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import Positive, check_fields
from .errors import RuntimeStateError, SettingsError, UnsupportedModelError
from .hf_config import ModelShape


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
        SettingsError: a size below 1, or sequence parallelism without tensor parallelism.
    """

    tensor: Positive = 1
    pipeline: Positive = 1
    expert: Positive = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sequence_parallel and self.tensor == 1:
            raise SettingsError("layout.sequence_parallel needs layout.tensor of at least 2, got 1")

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

    def check_fit(self, shape: ModelShape) -> None:
        """Refuse a model that cannot be split this way.

        Raises:
            UnsupportedModelError: heads, key-value heads, widths, layers or experts are no multiple of
                the ranks that split them, or there are fewer tokens than such ranks; names both.
        """
        split = {
            "num_attention_heads": (shape.heads, "tensor", self.tensor),
            "num_key_value_heads": (shape.kv_heads, "tensor", self.tensor),
            "intermediate_size": (shape.intermediate, "tensor", self.tensor),
            "num_hidden_layers": (shape.layers, "pipeline", self.pipeline),
        }
        if shape.experts is not None:
            split["moe_intermediate_size"] = (shape.experts.intermediate, "tensor", self.tensor)
            split["num_experts"] = (shape.experts.count, "expert", self.expert)
        elif self.expert > 1:
            raise UnsupportedModelError(
                f"layout.expert is {self.expert}, and a {shape.model_type} model has no experts; set it to 1"
            )
        for key, (size, name, ranks) in split.items():
            if size % ranks:
                raise UnsupportedModelError(
                    f"the model's {key} is {size}, which layout.{name} = {ranks} does not divide; "
                    f"choose a divisor of {size}"
                )
        if shape.vocabulary < self.tensor:
            raise UnsupportedModelError(
                f"the model's vocab_size is {shape.vocabulary}, less than layout.tensor = {self.tensor}"
            )
