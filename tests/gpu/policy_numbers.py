"""What a policy computes on this process's device, as numbers: run where CUDA is hidden, and where not.

    python -m tests.gpu.policy_numbers MODEL_FOLDER DTYPE OUTPUT.safetensors

Needs torch, megatron-core and rl-policy-megatron only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_policy_megatron import MegatronPolicy, OptimizerSettings, PolicySettings

SIZES = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
STEPS = 3
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Rows:
    """The smallest batch that a policy takes."""

    input_ids: torch.Tensor
    lengths: torch.Tensor

    def select(self, rows: Sequence[int]) -> Rows:
        """See :class:`rl_policy_megatron.microbatch.Batch`."""
        return Rows(self.input_ids[list(rows)], self.lengths[list(rows)])


def write_model(folder: Path) -> None:
    """A Qwen3 with random weights, without the help of ``transformers``."""
    hidden, inner, heads = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_attention_heads"]
    groups, width = SIZES["num_key_value_heads"], SIZES["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (SIZES["vocab_size"], hidden),
        "lm_head.weight": (SIZES["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (width,),
            "self_attn.k_norm": (width,),
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (groups * width, hidden),
            "self_attn.v_proj": (groups * width, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: 1 + 0.1 * torch.randn(shape, generator=draw)
        if len(shape) == 1
        else 0.08 * torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES))
    save_file(weights, folder / "model.safetensors")


def make_rows() -> Rows:
    """Rows of different lengths; padding holds what no model could read."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor([40, 17, 64, 2, 33, 64])
    ids = torch.randint(0, SIZES["vocab_size"], (len(lengths), 64), generator=draw)
    return Rows(ids.masked_fill(torch.arange(64) >= lengths[:, None], -1), lengths)


def compute(folder: Path, dtype: Any) -> dict[str, torch.Tensor]:
    """Log-probabilities before and after :data:`STEPS` updates, the first gradient, and losses with norms."""
    rows = make_rows()
    predicted = int((rows.lengths - 1).sum())

    def loss_fn(logits: Any, _rows: Rows) -> tuple[torch.Tensor, dict[str, Any]]:
        return -(logits.logprobs().sum() + 0.01 * logits.entropy().sum()) / predicted, {}

    settings = PolicySettings(dtype=dtype, micro_batch_size=2, temperature=0.7)
    with MegatronPolicy(folder, settings, OptimizerSettings()) as policy:
        found = {"before": policy.logprobs(rows)}
        found |= {f"gradient.{name}": grad for name, grad in policy.gradients(rows, loss_fn).items()}
        steps = [policy.train(rows, loss_fn, learning_rate=LEARNING_RATE) for _ in range(STEPS)]
        found["steps"] = torch.tensor([[step["loss"], step["grad_norm"]] for step in steps])
        found["after"] = policy.logprobs(rows)
    return {name: tensor.float().cpu().contiguous() for name, tensor in found.items()}


def main() -> None:
    """Compute and save."""
    folder, dtype, output = sys.argv[1:]
    save_file(compute(Path(folder), dtype), output)


if __name__ == "__main__":
    main()
