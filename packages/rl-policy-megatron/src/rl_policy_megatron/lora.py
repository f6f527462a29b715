"""Low-rank adapters on megatron's linears: a frozen base and, beside it, the little that learns.

Source: LoRA (Hu et al., 2021): ``y = x Wᵀ + (alpha / rank) · x Aᵀ Bᵀ`` with A ``[rank, in]`` and B
``[out, rank]``. There is one pair per projection of the Hugging Face layout, also where megatron
keeps several projections in one matrix, so that a merged weight is exactly W + (alpha / rank) · B A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .checks import AboveZero, Positive, check_fields
from .errors import SettingsError, UnsupportedModelError
from .hf_config import ModelShape
from .mapping import Layout, WeightSpec

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
    """One of megatron's linears, and the projections that its matrix holds."""

    linear: str
    hf_block: str
    layout: Layout
    projections: tuple[str, ...]

    def hf_name(self, layer: int, projection: str) -> str:
        return f"model.layers.{layer}.{self.hf_block}.{projection}"


SITES = (
    Site("self_attention.linear_qkv", "self_attn", Layout.QKV, ("q_proj", "k_proj", "v_proj")),
    Site("self_attention.linear_proj", "self_attn", Layout.WHOLE, ("o_proj",)),
    Site("mlp.linear_fc1", "mlp", Layout.GATE_UP, ("gate_proj", "up_proj")),
    Site("mlp.linear_fc2", "mlp", Layout.WHOLE, ("down_proj",)),
)


def _sizes(projection: str, shape: ModelShape) -> tuple[int, int]:
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


class Pair(torch.nn.Module):
    """A and B of one projection."""

    def __init__(self, inputs: int, outputs: int, settings: LoraSettings, like: torch.Tensor) -> None:
        super().__init__()
        placed = {"dtype": like.dtype, "device": like.device}
        self.lora_A = torch.nn.Parameter(torch.empty(settings.rank, inputs, **placed))
        self.lora_B = torch.nn.Parameter(torch.zeros(outputs, settings.rank, **placed))

    def draw(self, generator: torch.Generator) -> None:
        # As a linear layer is initialised; B stays zero, so that training starts at the base itself.
        bound = 1 / math.sqrt(self.lora_A.size(1))
        drawn = torch.empty(self.lora_A.shape, dtype=torch.float32)
        with torch.no_grad():
            self.lora_A.copy_(drawn.uniform_(-bound, bound, generator=generator))


class Adapter(torch.nn.Module):
    """What is added to the output of one of megatron's linears."""

    def __init__(self, site: Site, shape: ModelShape, settings: LoraSettings, like: torch.Tensor) -> None:
        super().__init__()
        self.site = site
        self._shape = shape
        self._scale = settings.scale
        self._outputs = [_sizes(projection, shape)[1] for projection in site.projections]
        for projection in site.projections:
            if projection in settings.targets:
                self.add_module(projection, Pair(*_sizes(projection, shape), settings, like))
        # The reference's pairs; none at all means the base without adapters.
        self.frozen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.uses_frozen = False

    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B by projection, those that are trained."""
        modules: Iterable[tuple[str, Any]] = self.named_children()
        return {projection: (pair.lora_A, pair.lora_B) for projection, pair in modules}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """``[S, B, in]`` → ``[S, B, out]`` in megatron's order of outputs; None if nothing is added."""
        pairs = self.frozen if self.uses_frozen else self.pairs()
        if not pairs:
            return None
        parts = []
        for projection, outputs in zip(self.site.projections, self._outputs, strict=True):
            if projection in pairs:
                down, up = pairs[projection]
                parts.append((inputs @ down.t() * self._scale) @ up.t())
            else:
                parts.append(inputs.new_zeros(*inputs.shape[:-1], outputs))
        if self.site.layout is Layout.QKV:
            groups, width = self._shape.kv_heads, self._shape.head_dim
            blocks = [part.reshape(*part.shape[:-1], groups, -1, width) for part in parts]
            return torch.cat(blocks, dim=-2).flatten(-3)
        return torch.cat(parts, dim=-1)


class AdapterMap:
    """The table between saved names and megatron's names of adapters, as WeightMap is for weights."""

    def __init__(self, shape: ModelShape, settings: LoraSettings, dtype: torch.dtype) -> None:
        self._saved: dict[str, str] = {}
        self.specs: dict[str, WeightSpec] = {}
        for number in range(shape.layers):
            for site in SITES:
                for projection in site.projections:
                    if projection not in settings.targets:
                        continue
                    inputs, outputs = _sizes(projection, shape)
                    sizes = {"lora_A": (settings.rank, inputs), "lora_B": (outputs, settings.rank)}
                    for part, size in sizes.items():
                        name = f"{site.hf_name(number, projection)}.{part}.weight"
                        parameter = f"decoder.layers.{number}.{site.linear}.adapter.{projection}.{part}"
                        self._saved[parameter] = name
                        self.specs[name] = WeightSpec(name, size, dtype)

    def fill(
        self, targets: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], source: object
    ) -> None:
        """Copy saved tensors into ``targets`` (megatron's name → tensor)."""
        with torch.no_grad():
            for parameter, target in targets.items():
                target.copy_(read(self._saved[parameter]))

    def gather(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """All named tensors under their saved names: adapters are whole on every rank."""
        for parameter, tensor in named:
            yield self._saved[parameter], tensor

    def gather_stage(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`gather`: there is one stage."""
        return self.gather(named)
