"""The decode loop: sample, record, stop, and drop the rows that are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol import EngineStopReason, GenerationError, SamplingParams
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
        limits: tokens that each row may get, ≥ 1; no more than its ``max_new_tokens``.
        vocab_size: logits beyond this column belong to padding and are never sampled.
        device: where the logits are.
        may_go_on: asked before each token; may block. When false, unfinished rows end as ``aborted`` with
            what they have.

    Raises:
        GenerationError: the model's logits are not numbers.
    """
    settings = RowSettings.of(params, max(limits), device)
    record = _Record(len(params), device)
    stops = _stop_table(params, device)
    limit = torch.tensor(limits, device=device)
    shortest_limit = min(limits)
    alive = torch.ones(len(params), dtype=torch.bool, device=device)
    count = len(params)
    logits = session.prefill()
    step = 0
    while may_go_on():
        tokens, logprobs = settings.next_tokens(logits[:, :vocab_size], step)
        record.add(tokens, logprobs)
        step += 1
        stopped = None if stops is None else (tokens[:, None] == stops).any(dim=1)
        going = alive if stopped is None else alive & ~stopped
        if step >= shortest_limit:
            going = going & (limit > step)
        # The one value per step that has to be known on the host, and only where a row can end.
        remaining = count if going is alive else int(going.sum())
        if remaining < count:
            record.end(alive & ~going, stopped, step)
            alive, count = going, remaining
            if remaining == 0:
                break
            if remaining <= COMPACT_AT * len(tokens):
                survivors = alive.nonzero().squeeze(1)
                session.keep(survivors)
                record.keep(survivors)
                settings = settings.keep(survivors)
                tokens, limit, alive = tokens[survivors], limit[survivors], alive[survivors]
                stops = None if stops is None else stops[survivors]
        logits = session.step(tokens)
    return record.continuations(aborted_at=step)


class _Record:
    """What was sampled, in blocks of steps between which rows were dropped."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = torch.arange(rows, device=device)
        self._blocks: list[tuple[Tensor, list[Tensor], list[Tensor]]] = [(self._rows, [], [])]
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def add(self, tokens: Tensor, logprobs: Tensor) -> None:
        _, all_tokens, all_logprobs = self._blocks[-1]
        all_tokens.append(tokens)
        all_logprobs.append(logprobs)

    def end(self, ended: Tensor, stopped: Tensor | None, length: int) -> None:
        rows = self._rows[ended]
        self._lengths[rows] = length
        if stopped is not None:
            self._stopped[rows] = stopped[ended]

    def keep(self, rows: Tensor) -> None:
        self._rows = self._rows[rows]
        self._blocks.append((self._rows, [], []))

    def continuations(self, aborted_at: int) -> list[Continuation]:
        tokens: list[list[int]] = [[] for _ in self._lengths]
        logprobs: list[list[float]] = [[] for _ in self._lengths]
        for rows, block_tokens, block_logprobs in self._blocks:
            if not block_tokens:
                continue
            chosen = torch.stack(block_logprobs, dim=1)
            if not bool(chosen.isfinite().all()):
                raise GenerationError(
                    "megatron generation: the model's logits are not finite numbers; its weights have "
                    "diverged or were not loaded"
                )
            columns = torch.stack(block_tokens, dim=1).tolist()
            for row, new_tokens, new_logprobs in zip(rows.tolist(), columns, chosen.tolist(), strict=True):
                tokens[row] += new_tokens
                logprobs[row] += new_logprobs
        out = []
        for row, (length, stopped) in enumerate(
            zip(self._lengths.tolist(), self._stopped.tolist(), strict=True)
        ):
            reason: EngineStopReason = "stop" if stopped else "length" if length else "aborted"
            end = length or aborted_at
            out.append(Continuation(tuple(tokens[row][:end]), tuple(logprobs[row][:end]), reason))
        return out


def _stop_table(params: Sequence[SamplingParams], device: torch.device) -> Tensor | None:
    """``[B, K]`` stop tokens, or ``None`` if no row has any; -1, which is no token, fills shorter rows."""
    width = max(len(p.stop_token_ids) for p in params)
    if width == 0:
        return None
    padded = [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in params]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(params), width)
