"""What stands in for parts of megatron's layers on a CPU: the same calls, computed by :mod:`.cpu_kernels`.

Each function here takes megatron's own and gives its replacement, which serves the settings that this
package uses and hands everything else to the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_kernels import rotate, swiglu


def mlp_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``MLP.forward``: one function in place of a split, an addition of 0 and a product."""

    def forward(
        mlp: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not _is_plain_swiglu(mlp.config):
            return original(mlp, hidden_states, per_token_scale=per_token_scale, **arguments)
        both, _ = mlp.linear_fc1(hidden_states)
        mixed = swiglu(both)
        if per_token_scale is not None:
            mixed = (mixed * per_token_scale.unsqueeze(-1)).to(mixed.dtype)
        return mlp.linear_fc2(mixed)

    return forward


def _is_plain_swiglu(config: Any) -> bool:
    other = (
        config.use_te_activation_func
        or config.bias_activation_fusion
        or config.add_bias_linear
        or config.activation_func_clamp_value is not None
        or config.glu_linear_offset
    )
    return config.gated_linear_unit and config.activation_func is F.silu and not other


def rotary(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For ``apply_rotary_pos_emb``: one function in place of two concatenations, one of them with nothing.

    Products are added without rounding them first, as rl_generation's rotation does.
    """

    def apply_rotary_pos_emb(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
        **arguments: Any,
    ) -> Tensor:
        if not _is_plain_rotary(config, freqs) or any(arguments.values()):
            return original(
                t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, cp_group=cp_group, **arguments
            )
        if cu_seqlens is None:
            return rotate(t, *_tables(freqs, mscale, t.dtype))
        placed = freqs[_positions(cu_seqlens)]
        return rotate(t.unsqueeze(1), *_tables(placed, mscale, t.dtype)).squeeze(1)

    return apply_rotary_pos_emb


def _is_plain_rotary(config: Any, freqs: Tensor) -> bool:
    other = (
        config.apply_rope_fusion
        or config.rotary_interleaved
        or config.multi_latent_attention
        or config.context_parallel_size > 1
    )
    return not other and freqs.dim() == 4 and freqs.shape[1:3] == (1, 1)


def _tables(freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cosines, sines = freqs.cos(), freqs.sin()
    if mscale != 1.0:
        cosines, sines = cosines * mscale, sines * mscale
    return cosines.to(dtype), sines.to(dtype)


def _positions(starts: Tensor) -> Tensor:
    """``[T]`` each token's place in its sequence; ``starts`` has where each begins, and last T."""
    starts = starts.long()
    begins = torch.repeat_interleave(starts[:-1], starts.diff())
    return torch.arange(len(begins), device=starts.device) - begins
