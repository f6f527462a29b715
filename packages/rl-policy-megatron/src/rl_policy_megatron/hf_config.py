"""Reads the config.json of an HF-format model directory, and refuses what cannot be trained as given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import AboveZero, Positive, check
from .errors import ModelDirectoryError, SettingsError, UnsupportedModelError
from .rope import Llama3Scaling, RopeShape


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model type fixes that its config.json does not say."""

    qkv_bias: bool
    qk_norm: bool
    default_head_dim: int | None = None
    experts: bool = False


FAMILIES = {
    "llama": _Family(qkv_bias=False, qk_norm=False),
    "qwen2": _Family(qkv_bias=True, qk_norm=False),
    "qwen3": _Family(qkv_bias=False, qk_norm=True, default_head_dim=128),
    "qwen3_moe": _Family(qkv_bias=False, qk_norm=True, experts=True),
}


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts in place of a layer's MLP.

    Attributes:
        count: experts of one layer.
        chosen: experts that each token goes through.
        intermediate: width of one expert's MLP.
        renormalise: whether the weights of a token's experts are made to sum to 1.
        dense_layers: numbers of the layers that have an ordinary MLP, ascending.
    """

    count: int
    chosen: int
    intermediate: int
    renormalise: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that decides a model's tensors and its arithmetic."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeShape
    experts: ExpertShape | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether that layer, counted from 0, is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``.

    Raises:
        ModelDirectoryError: missing, unreadable or not an object; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelDirectoryError(
            f"{path} does not exist; give a directory in Hugging Face format"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_model_shape(directory: Path) -> ModelShape:
    """The shape of the model in ``directory``.

    Raises:
        ModelDirectoryError: config.json is missing, broken or lacks a key.
        UnsupportedModelError: the model type or one of its options is not supported.
    """
    return _Reader(directory / "config.json").shape()


class _Reader:
    """config.json with messages that name file and key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = read_json(path)

    def shape(self) -> ModelShape:
        model_type = self._content.get("model_type")
        family = FAMILIES.get(str(model_type))
        if family is None:
            known = ", ".join(sorted(FAMILIES))
            raise UnsupportedModelError(f"{self._path}: model_type {model_type!r}; supported are {known}")
        self._refuse_options()
        heads, hidden = self._integer("num_attention_heads"), self._integer("hidden_size")
        head_dim = self._integer("head_dim", family.default_head_dim or hidden // heads)
        kv_heads = self._integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelDirectoryError(
                f"{self._path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        return ModelShape(
            model_type=str(model_type),
            layers=self._integer("num_hidden_layers"),
            hidden=hidden,
            intermediate=self._integer("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=self._integer("vocab_size"),
            max_positions=self._integer("max_position_embeddings"),
            norm_eps=self._number("rms_norm_eps", 1e-6),
            tied=self._flag("tie_word_embeddings"),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            rope=self._rope(),
            experts=self._experts() if family.experts else None,
        )

    def _experts(self) -> ExpertShape:
        content, layers = self._content, self._integer("num_hidden_layers")
        # transformers writes the second name since its version 5.
        count = self._integer("num_experts" if "num_experts" in content else "num_local_experts")
        chosen = self._integer("num_experts_per_tok")
        if chosen > count:
            raise ModelDirectoryError(
                f"{self._path}: num_experts_per_tok {chosen} is more than the {count} experts that there are"
            )
        step = self._integer("decoder_sparse_step", 1)
        listed = content.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(
            isinstance(layer, int) and 0 <= layer < layers for layer in listed
        ):
            raise ModelDirectoryError(
                f"{self._path}: mlp_only_layers must list layers from 0 to {layers - 1}, got {listed!r}"
            )
        dense = tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
        if len(dense) == layers:
            raise UnsupportedModelError(
                f"{self._path}: mlp_only_layers and decoder_sparse_step leave no layer with experts; "
                "give the model the model_type of its dense family"
            )
        return ExpertShape(
            count=count,
            chosen=chosen,
            intermediate=self._integer("moe_intermediate_size"),
            renormalise=self._flag("norm_topk_prob"),
            dense_layers=dense,
        )

    def _integer(self, key: str, default: int | None = None, inside: str = "") -> int:
        return self._checked(key, default, Positive, inside)

    def _number(self, key: str, default: float | None = None, inside: str = "") -> float:
        return float(self._checked(key, default, AboveZero, inside))

    def _flag(self, key: str) -> bool:
        return self._checked(key, False, bool)

    def _object(self, key: str) -> dict[str, Any]:
        return self._checked(key, {}, dict)

    def _checked(self, key: str, default: Any, wanted: Any, inside: str = "") -> Any:
        """A value of config.json, or of the object ``inside`` it; null counts as missing."""
        content = self._object(inside) if inside else self._content
        value = content.get(key)
        value = default if value is None else value
        try:
            check(f"{inside}.{key}" if inside else key, value, wanted)
        except SettingsError as error:
            raise ModelDirectoryError(f"{self._path}: {error}") from error
        return value

    def _refuse_options(self) -> None:
        content = self._content
        refused = {
            "hidden_act": content.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(content.get("attention_bias")),
            "mlp_bias": bool(content.get("mlp_bias")),
            "use_sliding_window": bool(content.get("use_sliding_window")),
            "layer_types": any(kind != "full_attention" for kind in content.get("layer_types") or ()),
            "quantization_config": content.get("quantization_config") is not None,
            "shared_expert_intermediate_size": bool(content.get("shared_expert_intermediate_size")),
        }
        for key, is_refused in refused.items():
            if is_refused:
                raise UnsupportedModelError(
                    f"{self._path}: {key} = {content[key]!r} is not supported; "
                    "use a SwiGLU model with full attention, without biases, shared experts and quantisation"
                )

    def _rope(self) -> RopeShape:
        content = self._content
        # Newer files keep everything under rope_parameters, older ones split it over two keys.
        key = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
        parameters = self._object(key)
        older = dict(self._object("rope_scaling"))
        if older:
            older.setdefault("rope_type", older.pop("type", None))
        if any(parameters.get(name) != value for name, value in older.items() if key == "rope_parameters"):
            raise UnsupportedModelError(
                f"{self._path}: rope_scaling and rope_parameters differ, and which one holds depends on who "
                "reads them; keep one of them"
            )
        theta = self._number("rope_theta", self._number("rope_theta", 10000.0), key)
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        whole = self._number("partial_rotary_factor", 1.0)
        if self._number("partial_rotary_factor", whole, key) != 1.0:
            raise UnsupportedModelError(f"{self._path}: partial_rotary_factor other than 1 is not supported")
        if kind == "default":
            return RopeShape(theta)
        if kind != "llama3":
            raise UnsupportedModelError(
                f"{self._path}: {key}.rope_type {kind!r} is not supported; supported are default, llama3"
            )
        scaling = Llama3Scaling(
            factor=self._number("factor", None, key),
            low_freq_factor=self._number("low_freq_factor", None, key),
            high_freq_factor=self._number("high_freq_factor", None, key),
            original_max_position_embeddings=self._integer("original_max_position_embeddings", None, key),
        )
        return RopeShape(theta, scaling)
