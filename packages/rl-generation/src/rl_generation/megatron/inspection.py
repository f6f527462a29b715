"""What this engine must know about a megatron-core model, and what it refuses."""

from __future__ import annotations

from typing import Any

from ..protocol import GenerationError


def unwrap(model: Any) -> Any:
    """The GPTModel inside wrappers such as megatron's ``DistributedDataParallel`` or ``Float16Module``.

    Raises:
        GenerationError: there is none.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    inner = model
    while not isinstance(inner, GPTModel):
        if not hasattr(inner, "module"):
            raise GenerationError(
                "megatron generation: needs a megatron-core GPTModel (wrapped or not), "
                f"got {type(model).__name__}"
            )
        inner = inner.module
    return inner


def refuse_unsupported(model: Any, vocab_size: int, max_context: int, max_batch: int) -> None:
    """Check a GPTModel and the engine's own limits.

    Raises:
        GenerationError: naming the setting that does not fit and what to do.
    """
    config = model.config
    problems = []
    if not (model.pre_process and model.post_process):
        problems.append("holds one pipeline stage only; generate with pipeline_model_parallel_size=1")
    if config.sequence_parallel:
        problems.append("uses sequence parallelism, which cannot split single tokens; turn it off")
    if config.context_parallel_size != 1:
        problems.append("uses context parallelism; generate with context_parallel_size=1")
    if config.tensor_model_parallel_size != 1:
        problems.append("uses tensor parallelism; generate with tensor_model_parallel_size=1")
    if config.expert_model_parallel_size != 1:
        problems.append("uses expert parallelism; generate with expert_model_parallel_size=1")
    if config.moe_expert_capacity_factor is not None:
        problems.append(
            "drops tokens of full experts, so that a token's probability depends on the rest of its batch; "
            "set moe_expert_capacity_factor to None"
        )
    if not 0 < vocab_size <= model.vocab_size:
        problems.append(f"has {model.vocab_size} logits, so vocab_size={vocab_size} cannot be")
    if max_context < 2:
        problems.append(f"cannot generate with max_context={max_context}; give at least 2")
    if model.position_embedding_type == "learned_absolute" and max_context > model.max_sequence_length:
        problems.append(f"has {model.max_sequence_length} positions, fewer than max_context={max_context}")
    if max_batch < 1:
        problems.append(f"cannot generate with max_batch={max_batch}; give at least 1")
    if problems:
        raise GenerationError("megatron generation: the model " + "; it ".join(problems))


def why_not_by_layers(model: Any) -> str | None:
    """Why a GPTModel cannot be decoded layer by layer; ``None`` when it can.

    Layers of a changed kind, or settings that change what happens between their parts, need the model's own
    forward pass.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    config = model.config
    plain = {
        "multi_latent_attention": False,
        "rotary_interleaved": False,
        "no_rope_freq": None,
        "attention_output_gate": False,
        "softmax_type": "vanilla",
        "window_size": None,
        "fp32_residual_connection": False,
        "inference_fuse_tp_communication": False,
        "fp8": None,
        "fp4": None,
    }
    for name, value in plain.items():
        if getattr(config, name, value) not in (value, None, False):
            return f"{name}={getattr(config, name)}"
    if model.position_embedding_type != "rope" or type(model.rotary_pos_emb) is not RotaryEmbedding:
        return f"position embedding {model.position_embedding_type} ({type(model.rotary_pos_emb).__name__})"
    for layer in model.decoder.layers:
        if type(layer) is not TransformerLayer:
            return f"a layer of type {type(layer).__name__}"
        if type(layer.self_attention) is not SelfAttention:
            return f"attention of type {type(layer.self_attention).__name__}"
        if not isinstance(layer.cross_attention, IdentityOp):
            return "cross-attention"
    return None
