"""A small language model and its tokenizer, made on the spot and the same for the same seed.

Both are written as an ordinary Hugging Face directory, so that everything after it treats them like
any pre-trained model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .config.sections import TinyModel

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocab_size`` entries, trained on ``texts``.

    Each digit is a token of its own, so that arithmetic is done on digits and not on chunks.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\d|[^\sA-Za-z]| ?[A-Za-z]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    reserved = 3 + len(MARKUP)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - reserved,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    tokenizer.add_special_tokens([PAD, TURN_START, TURN_END])
    tokenizer.add_tokens(list(MARKUP))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=TURN_END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(directory: Path, settings: TinyModel, texts: Sequence[str], seed: int) -> None:
    """Write tokenizer, configuration and random fp32 weights of a Qwen3, whole or not at all.

    Args:
        directory: a new one, or an empty one.
        settings: sizes of the model and the tokenizer.
        texts: what the tokenizer is trained on.
        seed: of the weights.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = make_tokenizer(texts, settings.vocab_size)
    tokenizer.save_pretrained(partial)
    vocab_size = -(-len(tokenizer) // 16) * 16
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": settings.context,
        "initializer_range": settings.initializer_range,
        "rms_norm_eps": 1e-6,
        "rope_theta": settings.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.normal(0.0, settings.initializer_range, shape, generator=generator)
        for name, shape in _qwen3_shapes(settings, vocab_size)
    }
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    for file in partial.iterdir():
        # The writers differ in this; a container's user must be able to read them all.
        file.chmod(0o644)
    os.rename(partial, directory)


def _qwen3_shapes(settings: TinyModel, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = settings.hidden_size, settings.intermediate_size
    queries, keys = settings.heads * settings.head_dim, settings.kv_heads * settings.head_dim
    yield "model.embed_tokens.weight", (vocab_size, hidden)
    for layer in range(settings.layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}self_attn.q_norm.weight", (settings.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (settings.head_dim,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
