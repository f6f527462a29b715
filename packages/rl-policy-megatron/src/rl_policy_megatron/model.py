"""Builds the megatron-core model of a model directory."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from . import cpu_adapter
from .errors import ModelDirectoryError
from .hf_config import ModelShape
from .layers import block_spec
from .mapping import WeightMap
from .mcore import GPTModel, TransformerConfig
from .placement import Placement
from .quiet import quiet_megatron
from .recompute import keep_layers_differentiable, recompute_config
from .settings import Recompute
from .sharding import WeightShards
from .tensor_files import TensorDirectory
from .vocabulary import VocabularyShard

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SET_BY_MEGATRON = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


class PolicyModel(GPTModel):
    """megatron's GPTModel, which with ``labels`` ends at the hidden states.

    Without labels it is the plain model: logits ``[B, S, V]``. With labels it returns the hidden
    states after the final norm, ``[S, B, H]``: log-probabilities are computed from those in chunks,
    so that logits of a whole batch never exist.
    """

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        input_ids: Any,
        position_ids: Any,
        labels: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if labels is not None:
            return hidden_states
        return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)

    @property
    def head_weight(self) -> torch.Tensor:
        """``[V, H]``, the matrix that turns hidden states into logits; this rank's rows of it.

        It exists on the last pipeline stage.
        """
        tied = self.share_embeddings_and_output_weights
        weight: Any = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def build_model(
    shape: ModelShape,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    placement: Placement | None = None,
) -> PolicyModel:
    """This rank's part of a model, on its device, in evaluation mode, its weights uninitialised."""
    placement = placement or Placement()
    stage = placement.pipeline
    per_stage = shape.layers // stage.size
    layers = range(stage.rank * per_stage, (stage.rank + 1) * per_stage)
    # megatron declares a spec of one layer here, and takes that of a whole block as well.
    decoder: Any = block_spec(shape, layers)
    with quiet_megatron(), cpu_adapter.device_scope(), _environment_kept():
        model = PolicyModel(
            config=_transformer_config(shape, dtype, recompute, placement),
            transformer_layer_spec=decoder,
            vocab_size=VocabularyShard(shape.vocabulary, placement.tensor).padded,
            max_sequence_length=shape.max_positions,
            pre_process=stage.first,
            post_process=stage.last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=shape.tied,
            parallel_output=True,
        )
    if recompute != "none":
        keep_layers_differentiable(model)
    device = cpu_adapter.device()
    model.rotary_pos_emb.inv_freq = shape.rope.inverse_frequencies(shape.head_dim).to(device)
    return model.to(device).eval()


def load_weights(model: PolicyModel, weight_map: WeightMap, shards: WeightShards, directory: Path) -> None:
    """Fill this rank's part of the model from the safetensors of ``directory``.

    Raises:
        ModelDirectoryError: a tensor is missing, of the wrong shape, or one too many; or the head
            differs from the embedding although config.json ties them.
    """
    tensors = TensorDirectory(directory)
    surplus = {name for name in tensors.names if not name.endswith("rotary_emb.inv_freq")}
    surplus -= set(weight_map.hf_names)
    if weight_map.shape.tied and _HEAD in surplus:
        surplus.remove(_HEAD)
        if not torch.equal(tensors.read(_HEAD), tensors.read(_EMBEDDING)):
            raise ModelDirectoryError(
                f"{directory}: config.json says tie_word_embeddings, but {_HEAD} differs from {_EMBEDDING}; "
                "set tie_word_embeddings to false"
            )
    if surplus:
        raise ModelDirectoryError(
            f"{directory} holds tensors that a {weight_map.shape.model_type} model has not: "
            f"{', '.join(sorted(surplus)[:5])}"
        )
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    shards.fill(parameters, tensors.read, directory)


def _transformer_config(
    shape: ModelShape, dtype: torch.dtype, recompute: Recompute, placement: Placement
) -> TransformerConfig:
    return TransformerConfig(
        tensor_model_parallel_size=placement.tensor.size,
        pipeline_model_parallel_size=placement.pipeline.size,
        expert_model_parallel_size=placement.expert.size,
        expert_tensor_parallel_size=placement.tensor.size,
        sequence_parallel=placement.sequence_parallel,
        # Stages tell each other the shapes: micro-batches are as long as their longest row.
        variable_seq_lengths=placement.pipeline.size > 1,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        # A policy is scored under the distribution it was sampled from, so dropout is off.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from files: building must neither spend time nor draw random numbers.
        use_cpu_initialization=True,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        # Micro-batch losses are shares of the global loss: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        # The kernels behind these need Transformer Engine or Apex.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=False,
        **recompute_config(recompute),
        **_experts_config(shape),
    )


def _experts_config(shape: ModelShape) -> dict[str, Any]:
    # The other dispatchers cannot pass tensors of varying length between pipeline stages, and
    # megatron asks for that whether or not there are experts.
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    experts = shape.experts
    if experts is None:
        return dispatcher
    return {
        **dispatcher,
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.layers)],
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.chosen,
        "moe_router_pre_softmax": True,
        # Balance is a property of the whole batch, which no micro-batch knows: no term is added.
        "moe_router_load_balancing_type": "none",
        # One expert after the other: grouped multiplication needs CUDA kernels.
        "moe_grouped_gemm": False,
    }


@contextmanager
def _environment_kept() -> Generator[None]:
    """megatron sets variables for Transformer Engine, which every process started later would inherit."""
    before = {name: os.environ.get(name) for name in _SET_BY_MEGATRON}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _leave_as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
