"""From TensorRT-LLM's outputs to tokens with one log-probability each."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import DeadlineError, GenerationError
from ..protocol import Completion, EngineStopReason


@dataclass(frozen=True, slots=True)
class Piece:
    """What one call of the engine sampled: a whole answer, or the part before a pause.

    ``logprobs[i]`` belongs to ``token_ids[i]``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: EngineStopReason


class Answer:
    """What a request has so far, over pauses and changes of weights.

    Args:
        limit: the most tokens that it may have, ≥ 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reason: EngineStopReason = "aborted"
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    @property
    def room(self) -> int:
        """How many more tokens there may be."""
        return self._limit - len(self.token_ids)

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be sampled."""
        return self._reason != "aborted"

    def take(self, piece: Piece, version: int) -> None:
        """Append what weights of that version sampled."""
        self.token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._versions += [version] * len(piece.token_ids)
        # An abort can come together with the last token that there was room for.
        self._reason = "length" if piece.stop_reason == "aborted" and not self.room else piece.stop_reason

    def completion(self, version: int) -> Completion:
        """As it is now; ``version`` is that of an answer without tokens."""
        return Completion(
            tuple(self.token_ids),
            tuple(self._logprobs),
            self._reason,
            self._versions[-1] if self._versions else version,
            tuple(self._versions) if len(set(self._versions)) > 1 else (),
        )


def read_output(output: Any, stop_token_ids: Collection[int], room: int, component: str) -> Piece:
    """Tokens, log-probabilities and the reason of one ``CompletionOutput``.

    The engine repeats a stop token, or pads with it, behind the one that it sampled; what follows the first
    one was never sampled, so it is dropped with its log-probabilities. After an abort there can be more
    log-probabilities than tokens, or fewer; what is no pair is dropped.

    Args:
        output: of one request, one sequence.
        stop_token_ids: of the request.
        room: the most tokens that were asked for.
        component: name that errors begin with.

    Raises:
        DeadlineError: the engine gave up on the request.
        GenerationError: the answer is none: lengths differ, a log-probability is missing or no number, the
            stop token is not in the answer, or it is longer than asked for.
    """
    reason = output.finish_reason
    tokens = [int(token) for token in output.token_ids or ()]
    entries = list(output.logprobs or ())
    if reason == "timeout":
        raise DeadlineError(f"{component}: the engine gave up on a request after {len(tokens)} tokens")
    aborted = reason == "cancelled"
    if aborted:
        pairs = min(len(tokens), len(entries))
        tokens, entries = tokens[:pairs], entries[:pairs]
    cut = next((i + 1 for i, token in enumerate(tokens) if token in stop_token_ids), None)
    if cut is not None:
        tokens, entries = tokens[:cut], entries[:cut]
    if len(entries) < len(tokens):
        raise GenerationError(
            f"{component}: the engine returned {len(tokens)} tokens with {len(entries)} log-probabilities; "
            "this release does not do what the adapter expects of it"
        )
    if len(tokens) > room:
        raise GenerationError(
            f"{component}: the engine returned {len(tokens)} tokens where at most {room} were asked for"
        )
    logprobs = _sampled_logprobs(tokens, entries, component)
    return Piece(tuple(tokens), logprobs, _stop_reason(reason, cut is not None, component))


def _stop_reason(reason: Any, stopped: bool, component: str) -> EngineStopReason:
    if stopped:
        return "stop"
    if reason == "length":
        return "length"
    if reason == "cancelled":
        return "aborted"
    raise GenerationError(
        f"{component}: the engine says finish_reason {reason!r}, and none of the request's stop tokens is in "
        "the answer; without it, its log-probability is lost"
    )


def _sampled_logprobs(tokens: Sequence[int], entries: Sequence[Any], component: str) -> tuple[float, ...]:
    # An entry is a number, or one per candidate, of which the likeliest may come first.
    logprobs: list[float] = []
    for place, token in enumerate(tokens):
        entry = entries[place]
        value = float(entry) if isinstance(entry, (int, float)) else _of_token(entry, token)
        # A sampled token cannot have probability zero, and rounding lifts a log-probability a little above 0.
        if value is None or not math.isfinite(value) or value > 1e-3:
            raise GenerationError(
                f"{component}: token {token} at place {place} of an answer came with the log-probability "
                f"{entry!r}; expected a finite number ≤ 0 for this token"
            )
        logprobs.append(min(value, 0.0))
    return tuple(logprobs)


def _of_token(entry: Any, token: int) -> float | None:
    candidate = entry.get(token) if hasattr(entry, "get") else None
    return None if candidate is None else float(candidate.logprob)
