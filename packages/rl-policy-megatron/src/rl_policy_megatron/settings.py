"""How a policy computes and how it learns, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .checks import AboveZero, Beta, Positive, Rate, Seed, check_fields
from .errors import SettingsError
from .hf_config import ModelShape
from .layout import ParallelLayout
from .lora import LoraSettings

DType = Literal["float32", "bfloat16"]
Recompute = Literal["none", "full"]
_ROWS = 32


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How a policy computes.

    Attributes:
        dtype: of weights and activations. Log-probabilities, gradients and optimizer state are
            always float32. On CPUs ``bfloat16`` is several times slower than ``float32``.
        micro_batch_size: rows that go through the model at once, ≥ 1. Rows are grouped by length,
            so results do not depend on it beyond rounding, only memory and speed do.
        micro_batch_tokens: tokens that go through the model at once, ≥ 1, in place of
            ``micro_batch_size``, which must be left out: rows are gathered until ``rows × longest``
            or, packed, the sum of their lengths reaches it. A longer row goes alone. None counts rows.
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
        SettingsError: a value of another type or outside its range, naming it; or two that exclude
            each other.
    """

    dtype: DType = "float32"
    micro_batch_size: Positive = _ROWS
    micro_batch_tokens: Positive | None = None
    packing: bool = False
    recompute: Recompute = "none"
    logprob_chunk_tokens: Positive = 512
    temperature: AboveZero = 1.0
    seed: Seed = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.micro_batch_tokens is not None and self.micro_batch_size != _ROWS:
            raise SettingsError(
                f"micro_batch_size={self.micro_batch_size} would have no effect beside "
                f"micro_batch_tokens={self.micro_batch_tokens}: passes are cut by rows or by tokens; "
                "leave one of them out"
            )

    def check_fit(self, shape: ModelShape) -> None:
        """Refuse a model that cannot be split, or get adapters, as these settings say.

        Raises:
            UnsupportedModelError: naming the size or layers of the model, and the setting.
        """
        self.layout.check_fit(shape)
        if self.lora is not None:
            self.lora.check_fit(shape)


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW with decoupled weight decay; the learning rate comes with every update.

    Attributes:
        betas: decay of the two moments, each in [0, 1).
        eps: > 0, added to the root of the second moment.
        weight_decay: ≥ 0, applied to matrices (embeddings included), never to norms and biases.
        grad_clip: largest global L2 norm of the gradient; 0 turns clipping off.

    Raises:
        SettingsError: a value of another type or outside its range, naming it.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: AboveZero = 1e-8
    weight_decay: Rate = 0.0
    grad_clip: Rate = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
