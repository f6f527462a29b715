"""Everything of megatron-core that this package uses, imported once and without its greetings.

The list is also the surface to check when megatron-core moves to a new version.

Raises:
    ImportError: megatron-core is missing; says which extra installs it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .quiet import quiet_megatron

try:
    with quiet_megatron():
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import random as random_states
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )
        from megatron.core.transformer import attention as attention_layers
        from megatron.core.transformer.mlp import MLP
        from megatron.core.transformer.module import MegatronModule
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    raise ImportError(
        "MegatronPolicy needs megatron-core; install it with: pip install 'rl-policy-megatron[mcore]'"
    ) from error

__all__ = [
    "MLP",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "ModuleSpec",
    "OptimizerConfig",
    "PackedSeqParams",
    "RotaryEmbedding",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "attention_layers",
    "clip_grad_by_total_norm_fp32",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "parallel_state",
    "random_states",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "submodules_of",
    "token_dispatcher",
]


def submodules_of(part: Any) -> Any:
    """The submodules of a part of a layer's spec, to be read and replaced.

    Until 0.16 a part is a ModuleSpec; later versions bind a builder's ``submodules`` argument.
    """
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules
