"""A loss function's access to the model's output: per-token numbers, never logits."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from .agreement import Lockstep
from .answers import shown
from .errors import LossError
from .linear_logprobs import linear_logprobs, linear_topk
from .microbatch import TokenLayout
from .vocabulary import VocabularyShard


class HiddenStatesView:
    """Per-token numbers of one micro-batch, computed when asked for.

    Everything is float32, differentiable, and laid out ``[B, S, …]``: entry ``[b, i]`` belongs to
    token ``i`` of row ``b``, under the sampling temperature. Column 0 and padding are 0. Results lie
    on the batch's device.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        layout: TokenLayout,
        *,
        temperature: float,
        chunk_tokens: int,
        vocabulary: VocabularyShard | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        """``hidden`` is ``[L, B, H]`` from the model, ``weight`` its head, or this rank's rows of it.

        ``lockstep`` is told of every call that the ranks of the vocabulary must make together.
        """
        self._hidden = hidden.flatten(0, 1).index_select(0, layout.source)
        self._weight = weight
        self._layout = layout
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens
        self._vocabulary = vocabulary or VocabularyShard(len(weight))
        self._lockstep = lockstep or Lockstep(self._vocabulary.ranks)
        self._computed: tuple[torch.Tensor, torch.Tensor] | None = None

    def logprobs(self) -> torch.Tensor:
        """``[B, S]`` log-probability of each token given its prefix."""
        if torch.is_grad_enabled() or self._computed is not None:
            return self._own_tokens()[0]
        # Scoring wants nothing else, so it does not pay for the entropy.
        return self._layout.scatter(self._score(self._layout.token_ids[:, None])[0][:, 0])

    def entropy(self) -> torch.Tensor:
        """``[B, S]`` entropy, in nats, of the distribution that each token was drawn from."""
        return self._own_tokens()[1]

    def topk_logprobs(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, S, k]`` log-probabilities and int64 ids of the k most likely tokens, most likely first.

        Raises:
            LossError: ``k`` is no integer between 1 and the size of the vocabulary.
        """
        k = checked_top(k, self._vocabulary.size)
        self._lockstep.enter(k)
        token_ids = linear_topk(
            self._hidden, self._weight, k, chunk_tokens=self._chunk_tokens, vocabulary=self._vocabulary
        )
        return self._layout.scatter(self._score(token_ids)[0]), self._layout.scatter(token_ids)

    def logprobs_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[B, S, K]`` log-probabilities of given tokens (int64 ``[B, S, K]``), as a teacher's top k.

        Raises:
            LossError: ``token_ids`` is of another type or shape, or has an id outside the vocabulary at a
                real token.
        """
        rows, width = self._layout.shape
        if (
            not isinstance(token_ids, torch.Tensor)
            or token_ids.dtype != torch.int64
            or token_ids.dim() != 3
            or token_ids.shape[:2] != (rows, width)
        ):
            raise LossError(
                f"the token_ids of logprobs_of must be an int64 tensor [{rows}, {width}, K], got "
                f"{shown(token_ids)}"
            )
        wanted = token_ids.to(self._weight.device).flatten(0, 1)[self._layout.target]
        if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= self._vocabulary.size):
            raise LossError(f"token_ids holds ids outside the vocabulary of {self._vocabulary.size}")
        return self._layout.scatter(self._score(wanted)[0])

    def nothing(self) -> torch.Tensor:
        """A loss of 0 that depends on the hidden states, so that a backward pass goes all the way."""
        return self._hidden[:0].sum(dtype=torch.float32)

    def _own_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Both come from one pass: the entropy costs little beside the logits that it needs.
        if self._computed is None:
            logprobs, entropy = self._score(self._layout.token_ids[:, None], with_entropy=True)
            self._computed = self._layout.scatter(logprobs[:, 0]), self._layout.scatter(entropy)
        return self._computed

    def _score(
        self, token_ids: torch.Tensor, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Distinct for every width and kind, so that ranks that ask for different things find out.
        self._lockstep.enter(-1 - 2 * token_ids.size(1) - int(with_entropy))
        return linear_logprobs(
            self._hidden,
            self._weight,
            token_ids,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            with_entropy=with_entropy,
            vocabulary=self._vocabulary,
        )


def checked_top(k: Any, vocabulary: int) -> int:
    """``k``, a number of most likely tokens.

    Raises:
        LossError: it is no integer between 1 and the size of the vocabulary; a flag is none.
    """
    if not isinstance(k, Integral) or isinstance(k, bool) or not 1 <= int(k) <= vocabulary:
        raise LossError(
            f"the k of the top k must be an integer between 1 and the vocabulary of {vocabulary}, "
            f"got {shown(k)}"
        )
    return int(k)
