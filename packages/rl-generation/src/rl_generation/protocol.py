"""What every rollout engine does: tokens in, tokens out, with the exact log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from .failures import GenerationError

__all__ = [
    "Completion",
    "EngineStopReason",
    "Generation",
    "GenerationError",
    "GenerationRequest",
    "RefitSpec",
    "RefitTensor",
    "SamplingParams",
]

EngineStopReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_new_tokens: upper bound on sampled tokens, ≥ 1.
        temperature: > 0 divides the logits; exactly 0 is greedy decoding.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: number of candidates, 0 is off.
        stop_token_ids: sampling one of these ends the request; the token is kept in the answer.
        seed: in [0, 2**63); makes the request reproducible whatever else is in its batch; ``None`` draws one.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 turns it off), got {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, as token ids, and how to continue it."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one request.

    ``logprobs[i]`` is the natural-log probability of ``token_ids[i]`` under the distribution that
    it was actually sampled from (temperature, top-k and top-p applied; for greedy decoding, of the
    untempered distribution).

    Attributes:
        token_ids: what was sampled, the stop token included.
        logprobs: one per token.
        stop_reason: why it ended.
        weight_version: of the weights that sampled the last token.
        token_versions: one per token, where weights changed on the way; empty means ``weight_version``
            for all.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: EngineStopReason
    weight_version: int
    token_versions: tuple[int, ...] = ()

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Version of the weights that sampled each token."""
        return self.token_versions or (self.weight_version,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RefitTensor:
    """Name (HF layout), shape and dtype of one tensor that a refit will carry."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RefitSpec:
    """Everything a refit will carry, announced before the first tensor moves."""

    tensors: tuple[RefitTensor, ...]


@runtime_checkable
class Generation(Protocol):
    """A rollout engine. One class per backend implements it."""

    @property
    def base_urls(self) -> list[str]:
        """URLs of its HTTP servers; ``[]`` when it serves none."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests."""
        ...

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion, for callers on an event loop."""
        ...

    def prepare_refit(self, spec: RefitSpec) -> None:
        """Check that the announced tensors fit this engine before any weight moves."""
        ...

    def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights; every cache that depends on the old ones is dropped."""
        ...

    def pause(self) -> None:
        """Stop admitting and decoding; requests keep what they have."""
        ...

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        ...

    def sleep(self) -> None:
        """Give memory back while the policy trains."""
        ...

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    def health(self) -> dict[str, Any]:
        """Facts about the engine's state, cheap to obtain."""
        ...

    def shutdown(self, timeout_s: float) -> None:
        """Release everything; idempotent, returns within ``timeout_s``."""
        ...
