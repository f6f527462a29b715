"""The arithmetic of a model's parts, without what megatron does around it.

Megatron's modules enter scopes, look up process groups and pass through autograd functions in every call.
For one token per row of a small model that costs several times the arithmetic itself. So a part that is
exactly of megatron's kind and carries no hook is replaced by its formula over the same weights; any other
part is called. The functions here take and give ``[n, h]`` tokens where megatron's modules want
``[s, b, h]``. What they return reads the weights where they are, and must not outlive a change of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Arithmetic = Callable[[Tensor], Tensor]


def is_bare(module: torch.nn.Module) -> bool:
    """Whether calling a module runs the ``forward`` of its class and nothing else."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and "forward" not in vars(module)


def embedding(module: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """``[b, s]`` tokens and positions → ``[b * s, h]``."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    if type(module) is LanguageModelEmbedding and is_bare(module):
        words = module.word_embeddings
        plain = type(words) is VocabParallelEmbedding and is_bare(words)
        if plain and not module.add_position_embedding and module.tokentype_embeddings is None:
            weight = words.weight
            return lambda tokens, positions: F.embedding(tokens.flatten(), weight)
    return lambda tokens, positions: module(tokens, positions).transpose(0, 1).flatten(0, 1)


def linear(module: Any, shared_weight: Tensor | None = None) -> Arithmetic:
    """``[n, in]`` → ``[n, out]``, the bias included also where megatron hands it back separately.

    Args:
        module: of tensor-parallel size 1.
        shared_weight: used in place of its own.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    if type(module) in (ColumnParallelLinear, RowParallelLinear) and is_bare(module):
        columns = (module.weight if shared_weight is None else shared_weight).t()
        bias = module.bias
        if bias is None:
            return lambda tokens: torch.mm(tokens, columns)
        return lambda tokens: torch.addmm(bias, tokens, columns)
    arguments = {} if shared_weight is None else {"weight": shared_weight}

    def call(tokens: Tensor) -> Tensor:
        out, bias = module(tokens[None], **arguments)
        return (out if bias is None else out + bias)[0]

    return call


def norm(module: Any) -> Arithmetic:
    """A norm over the last dimension of tensors of any shape; ``None`` is the identity."""
    from megatron.core.transformer.identity_op import IdentityOp

    if module is None or isinstance(module, IdentityOp):
        return lambda tokens: tokens
    if is_composed_rms_norm(module):
        return rms_norm(module.weight, module.eps)
    return module


def is_composed_rms_norm(module: Any) -> bool:
    """Whether a module is torch's RMSNorm where torch composes it of nine operations for lack of a kernel.

    That is float32 on a CPU. Elsewhere it rounds in ways that a formula would have to follow exactly.
    """
    if not isinstance(module, torch.nn.RMSNorm) or type(module).forward is not torch.nn.RMSNorm.forward:
        return False
    if not is_bare(module) or module.weight is None or len(module.normalized_shape) != 1:
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def rms_norm(weight: Tensor, eps: float | None) -> Arithmetic:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension (Zhang and Sennrich 2019), in float32.

    Args:
        weight: ``[..., D]``, broadcast over the tokens.
        eps: ``None`` is that of the dtype, as in torch.
    """
    width = weight.shape[-1]
    # With the division by the width moved into the weight six operations are left. A number would be made a
    # tensor in every call.
    floor = weight.new_tensor(width * (torch.finfo(torch.float32).eps if eps is None else eps))
    scaled = weight * width**0.5
    return lambda x: (x * (x * x).sum(-1, keepdim=True).add_(floor).rsqrt_()).mul_(scaled)


def mlp(module: Any) -> Arithmetic:
    """A dense MLP (``[n, h]`` → ``[n, h]``) from its two projections, or whatever stands in its place."""
    from megatron.core.transformer.mlp import MLP

    if type(module) is MLP and is_bare(module) and _has_plain_activation(module.config):
        first, second = linear(module.linear_fc1), linear(module.linear_fc2)
        activation = module.activation_func
        if not module.config.gated_linear_unit:
            return lambda tokens: second(activation(first(tokens)))

        def gated(tokens: Tensor) -> Tensor:
            gate, up = first(tokens).chunk(2, dim=-1)
            return second(activation(gate) * up)

        return gated
    return linear(module)


def _has_plain_activation(config: Any) -> bool:
    fused = config.use_te_activation_func or config.bias_activation_fusion
    return not fused and config.activation_func_clamp_value is None and not config.glu_linear_offset
