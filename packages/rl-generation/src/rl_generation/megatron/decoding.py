"""The decode loop: sample, record, stop, and drop the rows that are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol import EngineStopReason, SamplingParams
from ..row_settings import RowSettings
from .session import DecodeSession

# Copying the cache for the surviving rows costs about a tenth of a step, so it pays once a quarter is done.
COMPACT_AT = 0.75


@dataclass(frozen=True, slots=True)
class Continuation:
    """What one row became."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: EngineStopReason


def decode(
    session: DecodeSession,
    params: Sequence[SamplingParams],
    limits: Sequence[int],
    vocab_size: int,
    device: torch.device,
    may_go_on: Callable[[], bool],
) -> list[Continuation]:
    """Continue every row until it stops, is full, or the engine must end.

    Args:
        session: a fresh session with ``B`` rows.
        params: sampling settings per row.
        limits: tokens that each row may get, >= 1; no more than its ``max_new_tokens``.
        vocab_size: logits beyond this column belong to padding and are never sampled.
        device: where the logits are.
        may_go_on: asked before each step; may block. When false, unfinished rows end as ``aborted`` with
            what they have.
    """
    settings = RowSettings.of(params, max(limits), device)
    record = _Record(limits, device)
    stops = _stop_table(params, device)
    limit = torch.tensor(limits, device=device)
    rows = torch.arange(len(params), device=device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    logits = session.prefill()
    step = 0
    while may_go_on():
        tokens, logprobs = settings.next_tokens(logits[:, :vocab_size], step)
        record.write(step, rows, tokens, logprobs)
        step += 1
        hit = (tokens[:, None] == stops).any(dim=1)
        ended = alive & (hit | (limit <= step))
        alive = alive & ~ended
        remaining = int(alive.sum())
        record.end(rows[ended], step, hit[ended])
        if remaining == 0:
            break
        if remaining <= COMPACT_AT * len(rows):
            survivors = alive.nonzero().squeeze(1)
            session.keep(survivors)
            settings = settings.keep(survivors)
            rows, tokens, limit, stops = (
                rows[survivors],
                tokens[survivors],
                limit[survivors],
                stops[survivors],
            )
            alive = torch.ones_like(rows, dtype=torch.bool)
        logits = session.step(tokens)
    return record.continuations(aborted_at=step)


class _Record:
    def __init__(self, limits: Sequence[int], device: torch.device) -> None:
        shape = (max(limits), len(limits))
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(len(limits), dtype=torch.int64, device=device)
        self._stopped = torch.zeros(len(limits), dtype=torch.bool, device=device)

    def write(self, step: int, rows: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        self._tokens[step].index_copy_(0, rows, tokens)
        self._logprobs[step].index_copy_(0, rows, logprobs)

    def end(self, rows: Tensor, length: int, stopped: Tensor) -> None:
        self._lengths[rows] = length
        self._stopped[rows] = stopped

    def continuations(self, aborted_at: int) -> list[Continuation]:
        out = []
        tokens, logprobs = self._tokens.T.tolist(), self._logprobs.T.tolist()
        for row, (length, stopped) in enumerate(
            zip(self._lengths.tolist(), self._stopped.tolist(), strict=True)
        ):
            reason: EngineStopReason = "stop" if stopped else "length" if length else "aborted"
            length = length or aborted_at
            out.append(Continuation(tuple(tokens[row][:length]), tuple(logprobs[row][:length]), reason))
        return out


def _stop_table(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    width = max(len(p.stop_token_ids) for p in params)
    # -1 is no token, so padded places never match.
    padded = [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in params]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(params), width)
