"""The policy: how it computes, over how many processes, and which of its weights learn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from .section import Positive, Section

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Parallel(Section):
    """Processes that train the policy together: ``tensor`` × ``pipeline`` × ``data`` of them, each with a
    GPU of its own where there are GPUs. More than one needs an engine apart from the policy, such as
    ``generation.engine=vllm``."""

    tensor: PositiveInt = 1
    """Processes that split every matrix among them."""
    pipeline: PositiveInt = 1
    """Processes that split the layers among them."""
    expert: PositiveInt = 1
    """Of the ``data`` processes, those that split the experts of a mixture; a divisor of ``data``."""
    data: PositiveInt = 1
    """Groups of ``tensor`` × ``pipeline`` processes that split the rows of a batch among them."""
    sequence_parallel: bool = False
    """Whether ``tensor`` processes also split the tokens between the matrices; saves memory."""

    @model_validator(mode="after")
    def _fits_itself(self) -> Parallel:
        if self.data % self.expert:
            raise ValueError(
                f"expert={self.expert} does not divide data={self.data}; experts are split among the data "
                f"processes, so set data to a multiple of {self.expert}"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs tensor=2 or more; leave it out")
        return self

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.data


class Peft(Section):
    """Train low-rank adapters beside the weights, which stay as they are. Without this section all weights
    are trained; ``policy.peft={}`` is enough to turn adapters on."""

    rank: PositiveInt = 16
    """Of each adapter."""
    alpha: Positive = 32.0
    """What adapters add is scaled by ``alpha / rank``."""
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Projections that get adapters. Layers with experts have those of the attention only: q, k, v and o."""

    @model_validator(mode="after")
    def _each_once(self) -> Peft:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"targets must name each projection once, got {', '.join(self.targets)}")
        return self


class Policy(Section):
    """How the policy computes."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations. On CPUs bfloat16 is several times slower."""
    micro_batch_size: PositiveInt = 64
    """Sequences per forward and backward pass; results do not depend on it."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens per forward and backward pass, instead of ``micro_batch_size``, which is then left out; a
    longer sequence goes alone."""
    packing: bool = False
    """Put the sequences of a pass end to end instead of padding them to one length."""
    recompute: Literal["none", "full"] = "none"
    """``full`` keeps only each layer's input and computes the layer again in the backward pass: about a
    third more arithmetic for a fraction of the memory."""
    parallel: Parallel = Parallel()
    peft: Peft | None = None

    @model_validator(mode="after")
    def _passes_are_cut_by_one_measure(self) -> Policy:
        rows, tokens = self.micro_batch_size, self.micro_batch_tokens
        default = type(self).model_fields["micro_batch_size"].default
        # A resolved configuration has every key, so only another value tells that it was meant.
        if tokens is not None and rows != default:
            raise ValueError(
                f"micro_batch_size={rows} has no effect beside micro_batch_tokens={tokens}, which cuts "
                "passes by tokens instead of sequences; leave one of them out (micro_batch_size is "
                f"{default} by default)"
            )
        return self
