"""Tiny models of each kind, and what transformers computes from them in fp32."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_generation.protocol import Completion, GenerationRequest, SamplingParams
from rl_generation.sampling import sampling_logprobs

VOCAB = 64
CONTEXT = 96
KINDS = ("tied", "untied", "moe")


def write_model(kind: str, folder: Path, **overrides: Any) -> Path:
    """A random model in HF layout, with sharp distributions so that a wrong weight shows."""
    import transformers

    shape: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=kind == "tied",
    )
    if kind == "untied":
        # vLLM's attention on CPUs knows heads of 32 numbers and more.
        heads = dict(num_attention_heads=2, num_key_value_heads=1)
        config: Any = transformers.Qwen2Config(**shape | heads | overrides)
    elif kind == "moe":
        experts = dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
        config = transformers.Qwen3MoeConfig(**shape | experts | {"head_dim": 32} | overrides)
    else:
        config = transformers.Qwen3Config(**shape | {"head_dim": 32} | overrides)
    with torch.random.fork_rng():
        torch.manual_seed(KINDS.index(kind))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@dataclass
class Reference:
    """What transformers computes in fp32 from a state in HF layout.

    Attributes:
        folder: of the configuration.
        scratch: where states are written to be read by transformers.
        state: name → tensor of the newest version.
        models: one per version.
    """

    folder: Path
    scratch: Path
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    models: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from safetensors.torch import load_file

        self.state = load_file(self.folder / "model.safetensors")
        self.models[0] = self._load(self.folder)

    def moved(self, version: int, size: float = 0.1) -> dict[str, torch.Tensor]:
        """The weights of a new version: the last ones and noise."""
        from safetensors.torch import save_file

        noise = torch.Generator().manual_seed(version)
        self.state = {
            name: tensor + size * torch.randn(tensor.shape, generator=noise)
            for name, tensor in self.state.items()
        }
        target = self.scratch / f"version-{version}"
        target.mkdir()
        (target / "config.json").write_text((self.folder / "config.json").read_text())
        save_file(self.state, target / "model.safetensors", {"format": "pt"})
        self.models[version] = self._load(target)
        return self.state

    def logprobs(self, request: GenerationRequest, token_ids: Sequence[int], version: int) -> torch.Tensor:
        """``[T]`` log-probabilities of sampled tokens under the distribution that the request asks for."""
        ids = torch.tensor([[*request.prompt_token_ids, *token_ids]])
        with torch.no_grad():
            logits = self.models[version](ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        wanted = request.sampling
        if wanted.temperature == 0:
            rows = torch.log_softmax(logits.float(), dim=-1)
        else:
            rows = sampling_logprobs(logits, wanted.temperature, wanted.top_k, wanted.top_p)
        return rows.gather(1, torch.tensor(token_ids)[:, None]).squeeze(1)

    def errors(self, request: GenerationRequest, completion: Completion) -> torch.Tensor:
        """``[T]`` absolute differences, each token against the version that it says it is of."""
        versions = torch.tensor(completion.weight_versions)
        expected = torch.zeros(len(completion.token_ids))
        for version in set(completion.weight_versions):
            expected = torch.where(
                versions == version, self.logprobs(request, completion.token_ids, version), expected
            )
        return (expected - torch.tensor(completion.logprobs)).abs()

    def worst(self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> float:
        """The largest of :meth:`errors` over a batch."""
        pairs = zip(requests, completions, strict=True)
        return max(float(self.errors(request, completion).max()) for request, completion in pairs)

    @staticmethod
    def _load(folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@dataclass
class Lab:
    """An engine, the folder it was started from, and what it should compute."""

    engine: Any
    folder: Path
    reference: Reference

    def refit(self) -> int:
        """Move the engine to the next version; which that is."""
        version = self.engine.weight_version + 1
        self.engine.update_weights(self.reference.moved(version).items(), version)
        return version


async def reach(engine: Any, tokens: int) -> None:
    """Wait until the engine has sampled so many tokens since it started."""
    deadline = time.monotonic() + 30
    while (facts := await engine.health_async())["sampled_tokens"] < tokens:
        assert facts["state"] == "running", facts
        assert time.monotonic() < deadline, facts
        await asyncio.sleep(0.002)


def requests_of(
    count: int, tokens: int = 12, *, seed: int | None = 0, prompt: int = 5, **sampling: Any
) -> list[GenerationRequest]:
    """``count`` requests with prompts and seeds of their own."""
    return [
        GenerationRequest(
            tuple((7 * row + 3 * place) % VOCAB for place in range(1, prompt + row % 3)),
            SamplingParams(tokens, seed=None if seed is None else seed + row, **sampling),
        )
        for row in range(count)
    ]


def settings_for(folder: Path, name: str, **overrides: Any) -> Any:
    """Of an engine on one of these models, which are in float32; it has no tokenizer."""
    from rl_generation.vllm import VllmSettings

    values: dict[str, Any] = dict(
        name=name,
        max_model_len=CONTEXT,
        kv_cache_bytes=16 << 20,
        max_num_seqs=32,
        tokenizer=False,
        # So that the short prompts of tests fill blocks of the prefix cache.
        engine_arguments={"block_size": 32},
        start_timeout_s=240.0,
        request_timeout_s=60.0,
    )
    return VllmSettings(str(folder), **values | overrides)
