"""How a policy computes and how it learns, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from .layout import ParallelLayout
from .lora import LoraSettings

DType = Literal["float32", "bfloat16"]
Recompute = Literal["none", "full"]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How a policy computes.

    Attributes:
        dtype: of weights and activations. Log-probabilities, gradients and optimizer state are
            always float32. On CPUs ``bfloat16`` is several times slower than ``float32``.
        micro_batch_size: rows that go through the model at once, ≥ 1. Rows are grouped by length,
            so results do not depend on it beyond rounding, only memory and speed do.
        micro_batch_tokens: tokens that go through the model at once, ≥ 1, in place of
            ``micro_batch_size``: rows are gathered until ``rows × longest`` or, packed, the sum of
            their lengths reaches it. A longer row goes alone. None counts rows.
        packing: the rows of a micro-batch lie end to end as one sequence, each attending to itself
            only and with positions of its own, instead of side by side with padding.
        recompute: ``"full"`` keeps each layer's input only and computes the layer again in the
            backward pass: about a third more arithmetic for a fraction of the memory.
        logprob_chunk_tokens: tokens whose logits exist at one time, ≥ 1: memory for logits is this
            times the vocabulary times 4 bytes, whatever the batch.
        temperature: > 0; log-probabilities and entropies are those of ``softmax(logits / temperature)``,
            the distribution that the rollouts were sampled from.
        seed: of the policy's own random stream, which only a loss function that draws can consume.
        layout: how the model lies over the processes of torch.distributed; one process by default.
        lora: train adapters beside the weights, which stay as they are; None trains the weights.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    dtype: DType = "float32"
    micro_batch_size: int = 32
    micro_batch_tokens: int | None = None
    packing: bool = False
    recompute: Recompute = "none"
    logprob_chunk_tokens: int = 512
    temperature: float = 1.0
    seed: int = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}")
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {self.micro_batch_size}")
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1 or None, got {self.micro_batch_tokens}")
        if not isinstance(self.packing, bool):
            raise ValueError(f"packing must be True or False, got {self.packing!r}")
        if self.recompute not in ("none", "full"):
            raise ValueError(f"recompute must be 'none' or 'full', got {self.recompute!r}")
        if self.logprob_chunk_tokens < 1:
            raise ValueError(f"logprob_chunk_tokens must be at least 1, got {self.logprob_chunk_tokens}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number > 0, got {self.temperature}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}")
        if self.lora is not None and self.layout.model_ranks * self.layout.expert > 1:
            raise ValueError(
                "lora needs a layout of tensor = pipeline = expert = 1, got "
                f"{self.layout.tensor}, {self.layout.pipeline}, {self.layout.expert}; "
                "data-parallel ranks are what is left"
            )


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW with decoupled weight decay; the learning rate comes with every update.

    Attributes:
        betas: decay of the two moments, each in [0, 1).
        eps: > 0, added to the root of the second moment.
        weight_decay: ≥ 0, applied to matrices (embeddings included), never to norms and biases.
        grad_clip: largest global L2 norm of the gradient; 0 turns clipping off.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps must be a finite number > 0, got {self.eps}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a finite number >= 0, got {self.weight_decay}")
        if not 0 <= self.grad_clip < math.inf:
            raise ValueError(f"grad_clip must be a finite number >= 0 (0 turns it off), got {self.grad_clip}")
