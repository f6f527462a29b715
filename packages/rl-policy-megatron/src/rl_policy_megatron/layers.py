"""The layer that this package builds: megatron's parallel linears around torch's attention and norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .cpu_kernels import rms_norm
from .errors import RuntimeStateError
from .hf_config import ModelShape
from .mcore import (
    MegatronModule,
    ModuleSpec,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    submodules_of,
)
from .router import SoftmaxRouter


class SDPACoreAttention(MegatronModule):
    """Scaled dot-product attention with grouped queries, for training and for decoding with a cache."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        head_dim = config.kv_channels or config.hidden_size // config.num_attention_heads
        self._scale = softmax_scale or 1.0 / math.sqrt(head_dim)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """``query [Sq, B, heads, D]``, ``key`` and ``value [Sk, B, kv_heads, D]`` → ``[Sq, B, heads · D]``.

        With ``packed_seq_params`` the inputs are ``[T, heads, D]``, sequences end to end; each attends
        causally to itself, and the result is ``[T, heads · D]``.

        With ``attention_mask`` (bool, True = masked out, broadcastable to ``[B, 1, Sq, Sk]``)
        exactly that mask holds. Without one, equal lengths mean causal attention, and a single
        query sees every key: it is the newest token of a cached sequence.

        Raises:
            RuntimeStateError: several queries over a longer cache without a mask, which could mean
                more than one thing; a bias, or a mask over packed sequences, which are not supported.
        """
        if attention_bias is not None:
            raise RuntimeStateError("SDPACoreAttention takes no attention bias")
        if packed_seq_params is not None:
            if attention_mask is not None:
                raise RuntimeStateError("SDPACoreAttention takes no attention mask over packed sequences")
            return self._packed(query, key, value, packed_seq_params)
        queries, keys = query.size(0), key.size(0)
        allowed = None if attention_mask is None else attention_mask.logical_not()
        if allowed is None and queries not in (1, keys):
            raise RuntimeStateError(
                f"SDPACoreAttention got {queries} queries over {keys} keys without a mask; "
                "pass attention_mask (True = masked out) for a partly cached prompt"
            )
        mixed = self._attention(
            *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
            allowed=allowed,
            is_causal=allowed is None and queries == keys,
        )
        return mixed.permute(2, 0, 1, 3).reshape(queries, query.size(1), -1)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        # One call per sequence computes no score between sequences, as a block mask would.
        lengths = packed.cu_seqlens_q.diff().tolist()
        parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        mixed = [
            self._attention(*(part.transpose(0, 1)[None] for part in sequence), is_causal=True)
            for sequence in parts
        ]
        return torch.cat([part[0].transpose(0, 1) for part in mixed]).flatten(1)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All ``[B, heads, S, D]``, with fewer heads in ``key`` and ``value`` when queries are grouped."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            is_causal=is_causal,
            scale=self._scale,
            enable_gqa=query.size(1) != key.size(1),
        )


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under megatron's construction protocol."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Sequence parallelism reduces the gradients of the parameters that carry this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of ``[..., D]``, by one function where torch composes it of nine: float32 on a CPU.

        ``forward`` stays torch's own: by that an engine knows a module whose formula it may use. Hooks
        of the module are called as ever.
        """
        composed = x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32
        hooks = (self._forward_pre_hooks, self._forward_hooks, self._backward_pre_hooks, self._backward_hooks)
        if composed and self.eps is not None and not any(hooks):
            return rms_norm(x, self.weight, self.eps)
        return super().__call__(x)


def block_spec(shape: ModelShape, layers: Iterable[int] | None = None) -> TransformerBlockSubmodules:
    """The decoder's layers and its final norm.

    Args:
        shape: the model's.
        layers: numbers of the layers to build, counted from 0 over the whole model; all by default.
    """
    # megatron declares a module here, and builds one from a class.
    norm: Any = RMSNorm
    numbers = range(shape.layers) if layers is None else layers
    specs = {mixture: _layer_spec(shape, mixture) for mixture in {shape.has_experts(n) for n in numbers}}
    return TransformerBlockSubmodules(
        layer_specs=[specs[shape.has_experts(number)] for number in numbers], layer_norm=norm
    )


def _layer_spec(shape: ModelShape, mixture: bool) -> ModuleSpec:
    experts = shape.experts if mixture else None
    spec = get_gpt_layer_local_spec(
        num_experts=None if experts is None else experts.count,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if experts is not None:
        submodules_of(parts.mlp).router = partial(SoftmaxRouter, renormalise=experts.renormalise)
    return spec
