"""The table between Hugging Face tensors and megatron-core parameters.

Hugging Face names are those of the safetensors files. Merging and splitting only move whole blocks
of numbers, so a round trip is exact to the bit. The same table serves anything that has a
parameter's shape: weights, gradients, optimizer moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from .errors import ModelDirectoryError, PolicyError
from .hf_config import ModelShape


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Name (HF layout), shape and type of one tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout(Enum):
    """How HF tensors lie inside one megatron parameter."""

    WHOLE = "one tensor, as it is"
    QKV = "query, key and value interleaved by key-value group"
    GATE_UP = "gate above up"


Exists = Callable[[ModelShape, int], bool]


def _always(_shape: ModelShape, _layer: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Entry:
    """One megatron parameter and the HF tensors that it holds.

    ``{n}`` is the layer's number and ``{e}`` the expert's, both counted over the whole model.

    Attributes:
        parameter: its name where every layer is built of megatron's own modules.
        layout: how the HF tensors lie inside it.
        hf_names: theirs, in the order that the layout names them.
        exists: whether a model has it, in the layer of a given number.
        fused: its name where Transformer Engine's modules stand in; empty where that is the same.
    """

    parameter: str
    layout: Layout
    hf_names: tuple[str, ...]
    exists: Exists = _always
    fused: str = ""

    @property
    def of_expert(self) -> bool:
        return "{e}" in self.parameter

    def at(self, layer: int, expert: int) -> Entry:
        """The entry with its numbers filled in."""
        numbers = {"n": layer, "e": expert}
        hf_names = tuple(name.format(**numbers) for name in self.hf_names)
        parameter, fused = self.parameter.format(**numbers), self.fused.format(**numbers)
        return Entry(parameter, self.layout, hf_names, self.exists, fused)


def _layer(parameter: str, layout: Layout, *hf: str, exists: Exists = _always, fused: str = "") -> Entry:
    prefix = "decoder.layers.{n}."
    hf_names = tuple(f"model.layers.{{n}}.{name}" for name in hf)
    return Entry(prefix + parameter, layout, hf_names, exists, fused and prefix + fused)


def _has_qkv_bias(shape: ModelShape, _layer: int) -> bool:
    return shape.qkv_bias


def _has_qk_norm(shape: ModelShape, _layer: int) -> bool:
    return shape.qk_norm


def _has_own_head(shape: ModelShape, _layer: int) -> bool:
    return not shape.tied


def _is_dense(shape: ModelShape, layer: int) -> bool:
    return not shape.has_experts(layer)


def _is_mixture(shape: ModelShape, layer: int) -> bool:
    return shape.has_experts(layer)


_QKV_WEIGHTS = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_QKV_BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_EXPERT_GATE_UP = ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight")

# fmt: off
_FIRST = (
    Entry("embedding.word_embeddings.weight", Layout.WHOLE, ("model.embed_tokens.weight",)),
)
_EACH_LAYER = (
    _layer("input_layernorm.weight", Layout.WHOLE, "input_layernorm.weight",
           fused="self_attention.linear_qkv.layer_norm_weight"),
    _layer("self_attention.linear_qkv.weight", Layout.QKV, *_QKV_WEIGHTS),
    _layer("self_attention.linear_qkv.bias", Layout.QKV, *_QKV_BIASES, exists=_has_qkv_bias),
    _layer("self_attention.q_layernorm.weight", Layout.WHOLE, "self_attn.q_norm.weight", exists=_has_qk_norm),
    _layer("self_attention.k_layernorm.weight", Layout.WHOLE, "self_attn.k_norm.weight", exists=_has_qk_norm),
    _layer("self_attention.linear_proj.weight", Layout.WHOLE, "self_attn.o_proj.weight"),
    # Transformer Engine fuses this norm into a dense MLP only: a router reads its output as well.
    _layer("pre_mlp_layernorm.weight", Layout.WHOLE, "post_attention_layernorm.weight", exists=_is_dense,
           fused="mlp.linear_fc1.layer_norm_weight"),
    _layer("mlp.linear_fc1.weight", Layout.GATE_UP, *_GATE_UP, exists=_is_dense),
    _layer("mlp.linear_fc2.weight", Layout.WHOLE, "mlp.down_proj.weight", exists=_is_dense),
    _layer("pre_mlp_layernorm.weight", Layout.WHOLE, "post_attention_layernorm.weight", exists=_is_mixture),
    _layer("mlp.router.weight", Layout.WHOLE, "mlp.gate.weight", exists=_is_mixture),
    _layer("mlp.experts.local_experts.{e}.linear_fc1.weight", Layout.GATE_UP, *_EXPERT_GATE_UP,
           exists=_is_mixture, fused="mlp.experts.linear_fc1.weight{e}"),
    _layer("mlp.experts.local_experts.{e}.linear_fc2.weight", Layout.WHOLE,
           "mlp.experts.{e}.down_proj.weight", exists=_is_mixture, fused="mlp.experts.linear_fc2.weight{e}"),
)
_LAST = (
    Entry("decoder.final_layernorm.weight", Layout.WHOLE, ("model.norm.weight",)),
    Entry("output_layer.weight", Layout.WHOLE, ("lm_head.weight",), exists=_has_own_head),
)
# fmt: on


def _written_out(shape: ModelShape) -> Iterator[Entry]:
    experts = 0 if shape.experts is None else shape.experts.count
    yield from _FIRST
    for layer in range(shape.layers):
        for entry in _EACH_LAYER:
            if entry.exists(shape, layer):
                yield from (entry.at(layer, expert) for expert in range(experts if entry.of_expert else 1))
    yield from (entry for entry in _LAST if entry.exists(shape, shape.layers))


class WeightMap:
    """The table, written out for one model.

    A parameter may go by either of its names; results use the first, that of megatron's own modules.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._entry_of = {entry.parameter: entry for entry in _written_out(shape)}
        self._fused = {entry.fused: name for name, entry in self._entry_of.items() if entry.fused}

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self._entry_of)

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for entry in self._entry_of.values() for name in entry.hf_names)

    def entry(self, parameter: str) -> Entry:
        """The line of a parameter.

        Raises:
            PolicyError: the table has no such parameter.
        """
        entry = self._entry_of.get(self._fused.get(parameter, parameter))
        if entry is None:
            raise PolicyError(f"the table of a {self.shape.model_type} model has no parameter {parameter}")
        return entry

    def merge(self, parameter: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """A megatron tensor from the HF tensors that ``read`` returns by name."""
        entry = self.entry(parameter)
        parts = [read(name) for name in entry.hf_names]
        match entry.layout:
            case Layout.QKV:
                return self._interleave(parts)
            case Layout.GATE_UP:
                return torch.cat(parts)
            case Layout.WHOLE:
                return parts[0]

    def split(self, parameter: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and tensors from a megatron tensor; contiguous, memory shared where it can be."""
        entry = self.entry(parameter)
        match entry.layout:
            case Layout.QKV:
                parts = self._deinterleave(tensor)
            case Layout.GATE_UP:
                parts = tensor.chunk(2)
            case Layout.WHOLE:
                parts = (tensor,)
        yield from zip(entry.hf_names, parts, strict=True)

    def _interleave(self, parts: list[torch.Tensor]) -> torch.Tensor:
        groups, width = self.shape.kv_heads, self.shape.head_dim
        blocks = [part.reshape(groups, -1, width, *part.shape[1:]) for part in parts]
        return torch.cat(blocks, dim=1).reshape(-1, *parts[0].shape[1:])

    def _deinterleave(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups, width = self.shape.kv_heads, self.shape.head_dim
        queries = self.shape.heads // groups
        blocks = tensor.reshape(groups, queries + 2, width, *tensor.shape[1:])
        parts = blocks.split([queries, 1, 1], dim=1)
        return tuple(part.reshape(-1, *tensor.shape[1:]).contiguous() for part in parts)

    def merge_checked(
        self, parameter: str, read: Callable[[str], torch.Tensor], expected: torch.Size, source: object
    ) -> torch.Tensor:
        """As :meth:`merge`, refusing HF tensors that do not give the expected shape.

        Raises:
            ModelDirectoryError: they do not; names them and ``source``.
        """
        names = ", ".join(self.entry(parameter).hf_names)
        try:
            tensor = self.merge(parameter, read)
        except RuntimeError as error:
            if isinstance(error, PolicyError):
                raise
            raise ModelDirectoryError(f"{source}: {names} do not fit the model's heads: {error}") from error
        if tensor.shape != expected:
            raise ModelDirectoryError(
                f"{source}: {names} give shape {tuple(tensor.shape)}, the model needs {tuple(expected)}"
            )
        return tensor
