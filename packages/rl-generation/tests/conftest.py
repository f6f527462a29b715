"""A tiny megatron-core GPTModel on the CPU, built straight from megatron-core."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl_generation.refit.transports.segments import NAME

VOCAB = 61
PADDED_VOCAB = 64


def _core_attention_class() -> type:
    from megatron.core.transformer.module import MegatronModule

    class PlainAttention(MegatronModule):
        """Scaled dot-product attention: the given mask, or causal when lengths are equal, or none."""

        def __init__(self, config: Any, softmax_scale: float | None = None, **unused: Any) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            **unused: Any,
        ) -> torch.Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if attention_mask is None else ~attention_mask,
                is_causal=attention_mask is None and q.shape[2] == k.shape[2] > 1,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    return PlainAttention


@pytest.fixture(scope="session", autouse=True)
def ray_of_one_machine() -> None:
    """Ray reads this once, when it is imported; whoever starts a cluster here later relies on it."""
    if find_spec("ray") is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            import_module("ray")


@pytest.fixture(scope="module")
def megatron_on_cpu() -> Iterator[None]:
    """One gloo process group and megatron's parallel state; CUDA's device question answered with the CPU."""
    pytest.importorskip("megatron.core")
    import torch.distributed as dist
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    if not torch.cuda.is_available():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    patch.undo()


@pytest.fixture(scope="module")
def build_model(megatron_on_cpu: None) -> Callable[..., Any]:
    """A factory of seeded models; keyword arguments override the transformer configuration."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    attention = _core_attention_class()

    def build(
        *,
        seed: int = 0,
        tied: bool = True,
        context: int = 128,
        vocab: int = PADDED_VOCAB,
        **overrides: Any,
    ) -> Any:
        torch.manual_seed(seed)
        settings: dict[str, Any] = dict(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=8,
            ffn_hidden_size=48,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            qk_layernorm=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.2,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
        )
        settings.update(overrides)
        config = TransformerConfig(**settings)
        spec = get_gpt_layer_local_spec(
            num_experts=settings.get("num_moe_experts"),
            qk_layernorm=settings["qk_layernorm"],
            normalization="RMSNorm",
        )
        spec.submodules.self_attention.submodules.core_attention = attention
        return GPTModel(
            config,
            spec,
            vocab_size=vocab,
            max_sequence_length=context,
            position_embedding_type="rope",
            rotary_base=10000,
            share_embeddings_and_output_weights=tied,
        )

    return build


@pytest.fixture(scope="module")
def model(build_model: Callable[..., Any]) -> Any:
    """The model that most tests share; tests that change weights build their own."""
    return build_model()


@pytest.fixture
def open_segments() -> Callable[[], int]:
    """Counts the segments of shared memory that this process has open or mapped, as owner or reader."""

    def count() -> int:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(path).startswith(f"/memfd:{NAME}"):
                    found.add(os.stat(path).st_ino)
        return len(found)

    return count
