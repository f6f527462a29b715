"""Batches as a policy sees them: checked, grouped by length, reduced to the tokens worth computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .errors import BatchError


class Batch(Protocol):
    """What a policy needs to know of a batch; any class of this shape will do."""

    @property
    def input_ids(self) -> torch.Tensor:
        """``[B, S]`` int64, right-padded; padding may hold anything."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """``[B]`` int64, real tokens per row."""
        ...

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows, in this order, possibly cut to their longest."""
        ...


def check_batch(batch: Batch, vocabulary: int) -> None:
    """Refuse a batch that would index out of bounds or read padding.

    Raises:
        BatchError: wrong types or shapes, a length outside ``[0, S]``, a real token outside the vocabulary.
    """
    ids, lengths = batch.input_ids, batch.lengths
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise BatchError(f"input_ids must be int64 [B, S], got {ids.dtype} {tuple(ids.shape)}")
    if lengths.shape != ids.shape[:1] or lengths.dtype != torch.int64:
        raise BatchError(f"lengths must be int64 [{len(ids)}], got {lengths.dtype} {tuple(lengths.shape)}")
    if len(ids) == 0:
        return
    if int(lengths.min()) < 0 or int(lengths.max()) > ids.size(1):
        raise BatchError(f"lengths must lie in [0, {ids.size(1)}], got {lengths.tolist()}")
    wrong = _real(ids, lengths) & ((ids < 0) | (ids >= vocabulary))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise BatchError(
            f"input_ids[{row}, {column}] is {int(ids[row, column])}, outside the model's vocabulary of "
            f"{vocabulary}; the tokenizer does not belong to the model"
        )


def group_by_length(lengths: torch.Tensor, micro_batch_size: int) -> list[list[int]]:
    """Row numbers in micro-batches, longest rows first: little padding, and memory peaks at once."""
    order = torch.sort(lengths, descending=True, stable=True).indices.tolist()
    return [order[start : start + micro_batch_size] for start in range(0, len(order), micro_batch_size)]


def _real(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.size(1), device=ids.device) < lengths[:, None]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Which tokens of a micro-batch are predicted, and from where.

    The model runs over all columns but the last, whose output would predict nothing.

    Attributes:
        shape: ``(B, S)`` of the micro-batch.
        device: where the micro-batch lies, and its results belong.
        model_input: ``[B, L]`` int64 on the model's device, L ≤ S − 1, padding replaced by 0.
        token_ids: ``[N]`` int64, the predicted tokens, row by row.
        source: ``[N]`` int64, their rows in hidden states ``[L, B, H]`` seen as ``[L · B, H]``.
        target: ``[N]`` int64, their places in ``[B, S]`` seen as ``[B · S]``.
    """

    shape: tuple[int, int]
    device: torch.device
    model_input: torch.Tensor
    token_ids: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> TokenLayout:
        ids, lengths = batch.input_ids.to(device), batch.lengths.to(device)
        rows, width = ids.shape
        longest = int(lengths.max()) if rows else 0
        real = _real(ids, lengths)
        model_input = ids[:, : max(longest - 1, 0)].masked_fill(~real[:, : max(longest - 1, 0)], 0)
        row, column = real[:, 1:longest].nonzero(as_tuple=True)
        target = row * width + column + 1
        source = column * rows + row
        token_ids = ids.reshape(-1)[target]
        return cls((rows, width), batch.input_ids.device, model_input, token_ids, source, target)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """``[N, …]`` values of the predicted tokens → ``[B, S, …]``, 0 elsewhere; differentiable.

        The result lies where the micro-batch does, so that a loss can combine the two.
        """
        rows, width = self.shape
        flat = values.new_zeros((rows * width, *values.shape[1:]))
        placed = flat.index_copy(0, self.target, values).view(rows, width, *values.shape[1:])
        return placed.to(self.device)
