"""The models that generation is measured on: random weights in Hugging Face's layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sizes:
    """Of a Qwen3 with tied embeddings; the names are those of its configuration."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    initializer_range: float


MODELS = {
    # The model of the default job.
    "tiny": Sizes(512, 64, 192, 2, 2, 1, 32, 0.08),
    "30m": Sizes(8192, 512, 1536, 8, 8, 4, 64, 0.02),
}


def write_model(folder: Path, sizes: Sizes) -> int:
    """Save a model with random float32 weights; the number of its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        **asdict(sizes),
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())
