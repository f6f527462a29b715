"""What an engine thinks of tokens that it is given: their log-probabilities, and what it would have said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..failures import GenerationError


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of one sequence of n tokens, at temperature 1; entry i belongs to token i + 1, given those before it.

    Attributes:
        logprobs: of the tokens themselves, n - 1; a token of a prompt may have probability zero.
        top_ids: ``[n - 1, k]`` int64, the k most likely tokens, most likely first.
        top_logprobs: ``[n - 1, k]`` float32, their log-probabilities.
    """

    logprobs: tuple[float, ...]
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def prompt_scores(output: Any, token_ids: tuple[int, ...], component: str, *, top: int = 0) -> PromptScores:
    """What vLLM's ``prompt_logprobs`` says of ``token_ids``.

    Raises:
        GenerationError: it does not belong to the prompt, has fewer than ``top`` tokens at a place, or a
            log-probability is no number.
    """
    count = len(token_ids) - 1
    scores: list[float] = []
    ids = np.zeros((max(count, 0), top), dtype=np.int64)
    values = np.zeros((max(count, 0), top), dtype=np.float32)
    for token, candidates in zip(token_ids[1:], list(output.prompt_logprobs or ())[1:], strict=False):
        found = candidates.get(token) if candidates is not None else None
        if found is None:
            break
        score = float(found.logprob)
        if math.isnan(score):
            raise GenerationError(
                f"{component}: token {token} at place {len(scores) + 1} of a prompt came with the "
                f"log-probability {score}; expected a number; does the model overflow its dtype?"
            )
        if top:
            # The token itself is among them, whatever its rank.
            best = sorted(candidates.items(), key=lambda item: (item[1].rank, item[0]))[:top]
            if len(best) < top:
                raise GenerationError(
                    f"{component}: {len(best)} candidates came for place {len(scores) + 1} of a prompt, and "
                    f"{top} were asked for; the engine's argument max_logprobs or its vocabulary is smaller"
                )
            ids[len(scores)] = [token for token, _ in best]
            values[len(scores)] = [candidate.logprob for _, candidate in best]
        scores.append(score)
    if len(scores) != count:
        raise GenerationError(
            f"{component}: {len(scores)} of {count} prompt tokens came with a log-probability; "
            "this version of vLLM is not supported"
        )
    return PromptScores(tuple(scores), ids, values)
