"""Low-rank adapters on megatron's linears: a frozen base and, beside it, the little that learns.

Source: LoRA (Hu et al., 2021): ``y = x Wᵀ + (alpha / rank) · x Aᵀ Bᵀ`` with A ``[rank, in]`` and B
``[out, rank]``. There is one pair per projection of the Hugging Face layout, also where megatron
keeps several projections in one matrix, so that a merged weight is exactly W + (alpha / rank) · B A.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import AboveZero, Positive, check_fields
from .errors import SettingsError, UnsupportedModelError
from .hf_config import ModelShape
from .mapping import Layout

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Those of an MLP; the others belong to the attention.
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Which projections get adapters, and of what size.

    Attributes:
        rank: ≥ 1, columns of B and rows of A.
        alpha: > 0; what the adapters add is scaled by ``alpha / rank``.
        targets: projections by their Hugging Face names, some of :data:`TARGETS`.
        dropout: must be 0: a policy is scored under the distribution that it was sampled from.

    Raises:
        SettingsError: a value of another type or outside its range, naming it.
    """

    rank: Positive = 16
    alpha: AboveZero = 32.0
    targets: tuple[str, ...] = TARGETS
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = sorted(set(self.targets) - set(TARGETS))
        if unknown or not self.targets or len(set(self.targets)) != len(self.targets):
            raise SettingsError(
                f"LoraSettings.targets must name some of {', '.join(TARGETS)}, each once, got {self.targets}"
            )
        if self.dropout != 0:
            raise SettingsError(
                f"LoraSettings.dropout must be 0, got {self.dropout}: a policy is scored as it was sampled"
            )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    def check_fit(self, shape: ModelShape) -> None:
        """Refuse a model of which a target has no adapters.

        Raises:
            UnsupportedModelError: a target belongs to the MLP, and a layer has experts in its place.
        """
        inside = [name for name in self.targets if name in MLP_TARGETS]
        if inside and any(shape.has_experts(number) for number in range(shape.layers)):
            rest = [name for name in TARGETS if name not in MLP_TARGETS]
            raise UnsupportedModelError(
                f"lora.targets names {', '.join(inside)}, and layers of this {shape.model_type} model have "
                f"experts there, which get no adapters; set lora.targets to some of {', '.join(rest)}"
            )


@dataclass(frozen=True, slots=True)
class Site:
    """One of megatron's linears, and the projections that its matrix holds.

    Tensor-parallel ranks split its outputs or its inputs among them; so they do those of an adapter, B in
    the one case and A in the other, and have the other half of the pair whole.
    """

    linear: str
    hf_block: str
    layout: Layout
    projections: tuple[str, ...]
    splits_outputs: bool

    def hf_name(self, layer: int, projection: str) -> str:
        return f"model.layers.{layer}.{self.hf_block}.{projection}"


SITES = (
    Site("self_attention.linear_qkv", "self_attn", Layout.QKV, ("q_proj", "k_proj", "v_proj"), True),
    Site("self_attention.linear_proj", "self_attn", Layout.WHOLE, ("o_proj",), False),
    Site("mlp.linear_fc1", "mlp", Layout.GATE_UP, ("gate_proj", "up_proj"), True),
    Site("mlp.linear_fc2", "mlp", Layout.WHOLE, ("down_proj",), False),
)


def projection_sizes(projection: str, shape: ModelShape) -> tuple[int, int]:
    """Inputs and outputs of a projection."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj": (shape.hidden, queries),
        "k_proj": (shape.hidden, keys),
        "v_proj": (shape.hidden, keys),
        "o_proj": (queries, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }[projection]
