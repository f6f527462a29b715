"""Batches as a policy sees them: checked, and reduced to the tokens worth computing, padded or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from .errors import BatchError
from .mcore import PackedSeqParams


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


def check_batch(batch: Batch, vocabulary: int, positions: int | None = None) -> None:
    """Refuse a batch that would index out of bounds, read padding, or go beyond the model's positions.

    Args:
        batch: of any class.
        vocabulary: number of tokens.
        positions: longest row that the model was made for; None for any.

    Raises:
        BatchError: wrong types or shapes, a length outside ``[0, S]``, a row that is too long, a real token
            outside the vocabulary.
    """
    ids, lengths = (getattr(batch, name, None) for name in ("input_ids", "lengths"))
    if not callable(getattr(batch, "select", None)):
        raise BatchError(
            "a batch has the tensors input_ids and lengths, and select(rows), which micro-batches are made "
            f"with; {type(batch).__name__} has no such method"
        )
    if not isinstance(ids, torch.Tensor) or not isinstance(lengths, torch.Tensor):
        raise BatchError(
            f"a batch has the tensors input_ids and lengths, and select(rows); {type(batch).__name__} has "
            f"{type(ids).__name__} and {type(lengths).__name__} for the two"
        )
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise BatchError(f"input_ids must be int64 [B, S], got {ids.dtype} {tuple(ids.shape)}")
    if lengths.shape != ids.shape[:1] or lengths.dtype != torch.int64:
        raise BatchError(f"lengths must be int64 [{len(ids)}], got {lengths.dtype} {tuple(lengths.shape)}")
    if len(ids) == 0:
        return
    if int(lengths.min()) < 0 or int(lengths.max()) > ids.size(1):
        raise BatchError(f"lengths must lie in [0, {ids.size(1)}], got {lengths.tolist()}")
    if positions is not None and int(lengths.max()) > positions:
        row = int(lengths.argmax())
        raise BatchError(
            f"row {row} has {int(lengths[row])} tokens, the model was made for {positions} "
            "(max_position_embeddings in its config.json) and means nothing beyond; cut the row, or use a "
            "model with a longer context"
        )
    wrong = _real(ids, lengths) & ((ids < 0) | (ids >= vocabulary))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise BatchError(
            f"input_ids[{row}, {column}] is {int(ids[row, column])}, outside the model's vocabulary of "
            f"{vocabulary}; the tokenizer does not belong to the model"
        )


def selected(batch: Batch, rows: Sequence[int]) -> Batch:
    """Those rows of a checked batch, as its own ``select`` returns them.

    Raises:
        BatchError: what it returns is not these rows, in this order.
    """
    part = batch.select(rows)
    ids, lengths = (getattr(part, name, None) for name in ("input_ids", "lengths"))
    called = f"{type(batch).__name__}.select({list(rows)})"
    if not isinstance(ids, torch.Tensor) or not isinstance(lengths, torch.Tensor):
        raise BatchError(
            f"{called} must return a batch of these rows, with the tensors input_ids and lengths, got a "
            f"{type(part).__name__} with {type(ids).__name__} and {type(lengths).__name__} for the two"
        )
    count, widest = len(rows), batch.input_ids.size(1)
    wanted = batch.lengths[list(rows)]
    if (
        (ids.dtype, lengths.dtype) != (torch.int64, torch.int64)
        or ids.dim() != 2
        or lengths.shape != (count,)
        or len(ids) != count
        or not int(wanted.max()) <= ids.size(1) <= widest
    ):
        raise BatchError(
            f"{called} must return int64 input_ids [{count}, W], {int(wanted.max())} <= W <= {widest}, and "
            f"int64 lengths [{count}], got {ids.dtype} {tuple(ids.shape)} and {lengths.dtype} "
            f"{tuple(lengths.shape)}"
        )
    whole = batch.input_ids[list(rows), : ids.size(1)]
    differ = _real(whole, wanted) & (ids.to(whole.device) != whole)
    if not torch.equal(lengths.to(wanted.device), wanted) or bool(differ.any()):
        raise BatchError(
            f"{called} must return these rows in this order, got others: lengths {lengths.tolist()} in place "
            f"of {wanted.tolist()}, or other tokens"
        )
    return part


def _real(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.size(1), device=ids.device) < lengths[:, None]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How a micro-batch lies before the model: which tokens it reads, which it predicts, from where.

    Padded, each row is a row of the model's input. Packed, the rows lie end to end in a single one;
    each attends to itself only, and its positions begin at 0. The last token of a row would predict
    nothing, so it is not read. What the batch holds as padding is never read; the places that
    remain hold token 0, and nothing is predicted from them. The input is never empty: a micro-batch
    that predicts nothing has such places only, so that it can take part in collectives.

    Attributes:
        shape: ``(B, S)`` of the micro-batch.
        device: where the micro-batch lies, and its results belong.
        model_input: ``[B, L]`` int64 on the model's device, L ≤ S − 1 before ``pad_to``; packed
            ``[1, T]``; without rows ``[1, pad_to]``.
        positions: int64, of the same shape; each token's place in its own row.
        packed: where each sequence begins, for megatron; None when padded.
        token_ids: ``[N]`` int64, the predicted tokens, row by row.
        source: ``[N]`` int64, their rows in hidden states ``[L, B, H]`` seen as ``[L · B, H]``.
        target: ``[N]`` int64, their places in ``[B, S]`` seen as ``[B · S]``.
    """

    shape: tuple[int, int]
    device: torch.device
    model_input: torch.Tensor
    positions: torch.Tensor
    packed: PackedSeqParams | None
    token_ids: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device, *, packing: bool = False, pad_to: int = 1) -> TokenLayout:
        """The layout of a checked micro-batch.

        Args:
            batch: the micro-batch, on any device.
            device: the model's.
            packing: lay the rows end to end.
            pad_to: make L, or T, a multiple of this, ≥ 1: sequence parallelism divides it among ranks.
        """
        ids, lengths = batch.input_ids, batch.lengths
        width = ids.size(1)
        row, column = _real(ids, lengths)[:, 1:].nonzero(as_tuple=True)
        if packing:
            read = (lengths - 1).clamp(min=0).tolist()
            sequences = [length for length in read if length]
            tail = _surplus(sum(sequences), pad_to)
            # The tail is a sequence of its own: nothing attends to it, and it has positions as well.
            sequences += [tail] * (tail > 0)
            place = torch.arange(len(column), device=ids.device)
            size, at = (1, sum(sequences)), (torch.zeros_like(place), place)
            positions = torch.cat([torch.arange(length) for length in sequences])[None]
            packed, source = _packed_parameters(sequences), place
        else:
            columns = max(int(lengths.max()) - 1, 0) if len(lengths) else 0
            size, at = (max(len(ids), 1), columns + _surplus(columns, pad_to)), (row, column)
            positions = torch.arange(size[1]).expand(size)
            packed, source = None, column * size[0] + row
        model_input = ids.new_zeros(size)
        model_input[at] = ids[row, column]
        return cls(
            shape=(len(ids), width),
            device=ids.device,
            model_input=model_input.to(device),
            positions=positions.to(device),
            packed=packed,
            token_ids=ids[row, column + 1].to(device),
            source=source.to(device),
            target=(row * width + column + 1).to(device),
        )

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """``[N, …]`` values of the predicted tokens → ``[B, S, …]``, 0 elsewhere; differentiable.

        The result lies where the micro-batch does, so that a loss can combine the two.
        """
        rows, width = self.shape
        flat = values.new_zeros((rows * width, *values.shape[1:]))
        placed = flat.index_copy(0, self.target, values).view(rows, width, *values.shape[1:])
        return placed.to(self.device)


def _surplus(size: int, multiple: int) -> int:
    """What ``size`` lacks to the next positive multiple."""
    return -size % multiple if size else multiple


def _packed_parameters(sequences: list[int]) -> PackedSeqParams:
    # On the CPU on purpose: megatron's rotary embedding and the attention read them as numbers.
    bounds = torch.tensor([0, *accumulate(sequences)], dtype=torch.int32)
    # The longest sequence and no more: rotary embeddings as long as all sequences together
    # would be taken for those of positions that never restart.
    longest = max(sequences)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
