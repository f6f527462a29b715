"""A random Qwen3 with a byte-level tokenizer, as a Hugging Face directory, and its log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\n' }}"
    "{%- for tool in tools -%}{{ (tool.function | tojson) + '\n' }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB = 304
CONTEXT = 256
#: vLLM's attention on CPUs knows no smaller one.
HEAD = 32


def write_tokenizer(directory: Path) -> Any:
    """Bytes, a few merges, control tokens: to decode what a random model says and encode it changes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["user assistant system tool the answer of the question", "abababab cdcdcdcd name arguments"], trainer
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(TAGS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return fast


def write_model(directory: Path) -> Any:
    """Weights and configuration; the generation configuration asks for what no server may sample with."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_id=VOCAB - len(TAGS) - 1,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    hidden_defaults = {"do_sample": True, "temperature": 0.3, "top_p": 0.5, "top_k": 3, "max_new_tokens": 2}
    (directory / "generation_config.json").write_text(json.dumps(hidden_defaults), encoding="utf-8")
    return model


def logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> list[float]:
    """Of each sampled token, by one teacher-forced forward pass in float32."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0].float()
    table = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return table.gather(1, torch.tensor(sampled)[:, None]).squeeze(1).tolist()


def copy_to_megatron(source: Any, target: Any) -> None:
    """Give megatron-core's GPTModel (local layers) the weights of a Hugging Face Qwen3."""
    config = source.config
    groups, size = config.num_key_value_heads, config.head_dim
    tensors = source.state_dict()

    def of(name: str) -> torch.Tensor:
        return tensors[f"model.{name}.weight"]

    weights = {"embedding.word_embeddings": of("embed_tokens"), "decoder.final_layernorm": of("norm")}
    for i in range(config.num_hidden_layers):
        here, there = f"layers.{i}", f"decoder.layers.{i}"
        heads = [
            of(f"{here}.self_attn.{kind}_proj").view(groups, -1, size, config.hidden_size) for kind in "qkv"
        ]
        weights |= {
            f"{there}.input_layernorm": of(f"{here}.input_layernorm"),
            f"{there}.self_attention.linear_qkv": torch.cat(heads, dim=1).reshape(-1, config.hidden_size),
            f"{there}.self_attention.linear_proj": of(f"{here}.self_attn.o_proj"),
            f"{there}.self_attention.q_layernorm": of(f"{here}.self_attn.q_norm"),
            f"{there}.self_attention.k_layernorm": of(f"{here}.self_attn.k_norm"),
            f"{there}.pre_mlp_layernorm": of(f"{here}.post_attention_layernorm"),
            f"{there}.mlp.linear_fc1": torch.cat([of(f"{here}.mlp.{kind}_proj") for kind in ("gate", "up")]),
            f"{there}.mlp.linear_fc2": of(f"{here}.mlp.down_proj"),
        }
    with torch.no_grad():
        for name, weight in weights.items():
            target.get_submodule(name).weight.copy_(weight)
