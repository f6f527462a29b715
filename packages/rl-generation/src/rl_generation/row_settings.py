"""The sampling settings of a batch as tensors, one row per request, and one draw for all of them."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .protocol import SamplingParams
from .sampling import draw, greedy, sampling_logprobs, sampling_probabilities


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings and random numbers of ``B`` requests.

    Attributes:
        temperature: ``[B]`` float32; 1 in greedy rows.
        top_k: ``[B]`` int64; 0 is off.
        top_p: ``[B]`` float64; 1 is off.
        is_greedy: ``[B]`` bool.
        uniforms: ``[N, B]`` float64 in [0, 1): row ``t`` decides the ``t``-th token of every request.
        any_greedy: at least one row is greedy.
        all_greedy: all rows are greedy.
        tempered: at least one row has a temperature other than 1.
        filtered: at least one row uses top-k or top-p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    is_greedy: Tensor
    uniforms: Tensor
    any_greedy: bool
    all_greedy: bool
    tempered: bool
    filtered: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], draws: int, device: torch.device) -> RowSettings:
        """Settings of one batch.

        Args:
            params: one per row.
            draws: how many tokens each row can need.
            device: where the logits will be.
        """
        cold = [p.temperature == 0 for p in params]
        tempered = [1.0 if c else p.temperature for p, c in zip(params, cold, strict=True)]
        k = [0 if c else p.top_k for p, c in zip(params, cold, strict=True)]
        mass = [1.0 if c else p.top_p for p, c in zip(params, cold, strict=True)]
        all_greedy = all(cold)
        return cls(
            temperature=torch.tensor(tempered, dtype=torch.float32, device=device),
            top_k=torch.tensor(k, dtype=torch.int64, device=device),
            top_p=torch.tensor(mass, dtype=torch.float64, device=device),
            is_greedy=torch.tensor(cold, dtype=torch.bool, device=device),
            uniforms=request_uniforms([p.seed for p in params], 0 if all_greedy else draws).T.to(device),
            any_greedy=any(cold),
            all_greedy=all_greedy,
            tempered=any(t != 1 for t in tempered),
            filtered=any(k) or any(p < 1 for p in mass),
        )

    def keep(self, rows: Tensor) -> RowSettings:
        """The same settings for a subset of the rows, given as ``[B']`` indices."""
        return RowSettings(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            is_greedy=self.is_greedy[rows],
            uniforms=self.uniforms[:, rows],
            any_greedy=self.any_greedy,
            all_greedy=self.all_greedy,
            tempered=self.tempered,
            filtered=self.filtered,
        )

    def next_tokens(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The ``step``-th token of every row.

        Args:
            logits: ``[B, V]``.
            step: number of tokens that every row has already.

        Returns:
            ``[B]`` int64 tokens and ``[B]`` float32 log-probabilities, each under the distribution that its
            row was sampled from (greedy rows: the untempered one).
        """
        if self.all_greedy:
            return greedy(logits)
        temperature = self.temperature if self.tempered else 1.0
        if self.filtered:
            probabilities = sampling_logprobs(logits, temperature, self.top_k, self.top_p).exp()
        else:
            probabilities = sampling_probabilities(logits, temperature)
        tokens = draw(probabilities, self.uniforms[step])
        if self.any_greedy:
            tokens = torch.where(self.is_greedy, logits.argmax(dim=-1), tokens)
        return tokens, probabilities.gather(1, tokens[:, None]).squeeze(1).log_()


def request_uniforms(seeds: Sequence[int | None], draws: int) -> Tensor:
    """Independent uniform numbers per request, the same for the same seed in any batch.

    A shorter run is a prefix of a longer one. Python's Mersenne Twister is used because it takes the whole
    seed in; torch's CPU generator keeps only the low 32 bits, so that seeds such as ``step << 32 | row``
    would repeat themselves every step.

    Args:
        seeds: one per request; ``None`` draws one from the operating system, which leaves every other
            random state of the process alone.
        draws: how many numbers each request gets.

    Returns:
        ``[B, draws]`` float64 in [0, 1), on the CPU.
    """
    if draws == 0 or not seeds:
        return torch.zeros(len(seeds), draws, dtype=torch.float64)
    raw = b"".join(
        random.Random(secrets.randbits(63) if seed is None else seed).randbytes(8 * draws) for seed in seeds
    )
    words = torch.frombuffer(bytearray(raw), dtype=torch.int64).view(len(seeds), draws)
    return ((words >> 11) & (2**53 - 1)).double() * 2.0**-53
