"""Batches: what a policy scores and trains, with the denominators of the whole batch on board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from rl_gym_bridge.trajectory import Trajectory


class BatchError(ValueError):
    """Parts of a batch that do not belong together; names the part."""


@dataclass(frozen=True, eq=False, slots=True)
class TrainBatch:
    """Sequences to score or train. Immutable and pickleable.

    ``global_valid_tokens`` and ``global_valid_samples`` are the denominators of every loss. They
    are fixed when the batch is made (:meth:`create`) and survive :meth:`select`, so that the loss
    of a part is its share of the loss of the whole.

    Attributes:
        input_ids: ``[B, S]`` int64, right-padded.
        lengths: ``[B]`` int64, real tokens per row.
        token_mask: ``[B, S]`` bool, true on tokens to train: those that the policy sampled.
        sample_mask: ``[B]`` bool, false on rows that must not be trained.
        advantages: ``[B]`` or ``[B, S]`` float32.
        generation_logprobs: ``[B, S]`` float32, as reported by the engine.
        prev_logprobs: ``[B, S]`` float32 under the policy at the start of the step, or ``None``
            while unknown.
        reference_logprobs: ``[B, S]`` float32 under the frozen reference, or ``None``.
        teacher_logprobs: ``[B, S]`` float32 under the teacher, or ``None``.
        teacher_topk_logprobs: ``[B, S, K]`` float32 of the teacher's most likely tokens, or ``None``.
        teacher_topk_ids: ``[B, S, K]`` int64, those tokens, or ``None``.
        global_valid_tokens: masked-in tokens of masked-in rows of the whole batch.
        global_valid_samples: masked-in rows with such a token, of the whole batch.
        global_positive_tokens: those of the valid tokens whose advantage is positive.

    Raises:
        BatchError: a shape or dtype that does not fit.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    token_mask: torch.Tensor
    sample_mask: torch.Tensor
    advantages: torch.Tensor
    generation_logprobs: torch.Tensor
    prev_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    global_valid_tokens: float
    global_valid_samples: float
    teacher_logprobs: torch.Tensor | None = None
    teacher_topk_logprobs: torch.Tensor | None = None
    teacher_topk_ids: torch.Tensor | None = None
    global_positive_tokens: float = 0.0

    def __post_init__(self) -> None:
        rows, width = self.input_ids.shape if self.input_ids.ndim == 2 else (-1, -1)
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((rows, width), torch.int64),
            "lengths": ((rows,), torch.int64),
            "token_mask": ((rows, width), torch.bool),
            "sample_mask": ((rows,), torch.bool),
            "advantages": ((rows, width) if self.advantages.ndim == 2 else (rows,), torch.float32),
            "generation_logprobs": ((rows, width), torch.float32),
            "prev_logprobs": ((rows, width), torch.float32),
            "reference_logprobs": ((rows, width), torch.float32),
            "teacher_logprobs": ((rows, width), torch.float32),
            "teacher_topk_logprobs": ((rows, width, self._teacher_topk), torch.float32),
            "teacher_topk_ids": ((rows, width, self._teacher_topk), torch.int64),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
                raise BatchError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)} "
                    f"beside input_ids {list(self.input_ids.shape)}"
                )

    @classmethod
    def create(
        cls,
        *,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        token_mask: torch.Tensor,
        sample_mask: torch.Tensor,
        advantages: torch.Tensor,
        generation_logprobs: torch.Tensor,
        prev_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
    ) -> TrainBatch:
        """A whole batch; counts its own denominators.

        Raises:
            BatchError: parts that do not fit, or a masked-in token beyond the length of its row.
        """
        batch = cls(
            input_ids=input_ids,
            lengths=lengths,
            token_mask=token_mask,
            sample_mask=sample_mask,
            advantages=advantages,
            generation_logprobs=generation_logprobs,
            prev_logprobs=prev_logprobs,
            reference_logprobs=reference_logprobs,
            global_valid_tokens=0.0,
            global_valid_samples=0.0,
        )
        beyond = torch.arange(input_ids.shape[1], device=lengths.device) >= lengths.unsqueeze(1)
        stray = (token_mask & beyond).any(1).nonzero().flatten().tolist()
        if stray:
            raise BatchError(
                f"token_mask of rows {stray} is set beyond their lengths: padding is not trained"
            )
        return batch.with_own_denominators()

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def _teacher_topk(self) -> int:
        known = self.teacher_topk_ids
        return known.shape[2] if known is not None and known.ndim == 3 else 0

    @property
    def loss_mask(self) -> torch.Tensor:
        """``[B, S]`` bool: tokens of masked-in rows that enter the loss."""
        return self.token_mask & self.sample_mask.unsqueeze(1)

    @property
    def token_advantages(self) -> torch.Tensor:
        """``[B, S]`` float32, a row's advantage repeated over its tokens where it is one number."""
        if self.advantages.ndim == 2:
            return self.advantages
        return self.advantages.unsqueeze(1).expand(self.input_ids.shape)

    def select(self, rows: Sequence[int]) -> TrainBatch:
        """The given rows in the given order, cut to their longest; the denominators stay."""
        index = torch.as_tensor(list(rows), dtype=torch.int64, device=self.input_ids.device)
        lengths = self.lengths[index]
        width = int(lengths.max()) if len(index) else 0

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            # clone: a trimmed view would be pickled with the whole of its storage
            return tensor[index, :width].clone() if tensor.ndim > 1 else tensor[index]

        return replace(
            self, **{f.name: cut(getattr(self, f.name)) for f in fields(self) if f.name not in _COUNTS}
        )

    def with_logprobs(
        self,
        *,
        prev: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
        teacher: torch.Tensor | None = None,
    ) -> TrainBatch:
        """A copy with the given ``[B, S]`` log-probabilities set, as float32 constants on this device.

        Those not given stay as they are.
        """
        return replace(
            self,
            prev_logprobs=self.prev_logprobs if prev is None else self._constant(prev),
            reference_logprobs=self.reference_logprobs if reference is None else self._constant(reference),
            teacher_logprobs=self.teacher_logprobs if teacher is None else self._constant(teacher),
        )

    def with_teacher_topk(self, logprobs: torch.Tensor, token_ids: torch.Tensor) -> TrainBatch:
        """A copy with the teacher's ``[B, S, K]`` most likely tokens, as constants on this device."""
        return replace(
            self,
            teacher_topk_logprobs=self._constant(logprobs),
            teacher_topk_ids=token_ids.detach().to(device=self.input_ids.device, dtype=torch.int64),
        )

    def with_advantages(self, advantages: torch.Tensor) -> TrainBatch:
        """A copy with ``[B]`` or ``[B, S]`` advantages, as float32 constants on this device.

        For whole batches: what depends on advantages is counted anew.
        """
        return replace(self, advantages=self._constant(advantages)).with_own_denominators()

    def _constant(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().to(device=self.input_ids.device, dtype=torch.float32)

    def with_own_denominators(self) -> TrainBatch:
        """A copy that is a whole batch of its own, as each mini-batch with its own update is."""
        mask = self.loss_mask
        return replace(
            self,
            global_valid_tokens=float(mask.sum()),
            global_valid_samples=float(mask.any(1).sum()),
            global_positive_tokens=float((mask & (self.token_advantages > 0)).sum()),
        )

    def without_zero_gradient_rows(self, *, keep_zero_advantages: bool = False) -> TrainBatch:
        """The rows that can move the policy; the others are not computed but still counted.

        Dropped are rows with nothing to train and, unless ``keep_zero_advantages``, rows whose
        advantages are 0 on every token to train. The denominators stay, so a pure policy-gradient
        loss and its gradient do not change. With a KL or entropy term rows of advantage 0 have a
        gradient and must be kept. The result may have no row at all.
        """
        moving = self.loss_mask
        if not keep_zero_advantages:
            moving = moving & (self.token_advantages != 0)
        return self.select(moving.any(1).nonzero().flatten().tolist())

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on ``device``; itself when it is already there."""
        if self.input_ids.device == torch.device(device):
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _COUNTS}
        return replace(self, **{name: None if t is None else t.to(device) for name, t in moved.items()})


_COUNTS = ("global_valid_tokens", "global_valid_samples", "global_positive_tokens")


def build_train_batch(
    trajectories: Sequence[Trajectory],
    advantages: torch.Tensor,
    valid: torch.Tensor,
    pad_token_id: int,
) -> TrainBatch:
    """One row per trajectory, in the order given; only tokens that the policy sampled are trained.

    Args:
        trajectories: B of them; prompts, tool output and whatever else the policy did not sample
            is in the sequence but masked out, by construction of :class:`Trajectory`.
        advantages: ``[B]``, or ``[B, S]`` with S the longest sequence.
        valid: ``[B]`` bool; a trajectory without sampled tokens is masked out in any case.

    Raises:
        BatchError: no trajectory, counts that differ, or a sampled token without any prefix.
    """
    if not trajectories:
        raise BatchError("a batch needs at least one trajectory")
    if len(advantages) != len(trajectories) or tuple(valid.shape) != (len(trajectories),):
        raise BatchError(
            f"{len(trajectories)} trajectories with {len(advantages)} advantages and valid of shape "
            f"{list(valid.shape)}"
        )
    for trajectory in trajectories:
        if trajectory.token_mask[:1] == (1,):
            raise BatchError(
                f"rollout {trajectory.rollout_id} samples its first token without a prompt; such a token has "
                "no log-probability: give the model at least one prompt token"
            )
    sampled = torch.tensor([trajectory.sampled_tokens > 0 for trajectory in trajectories])
    return TrainBatch.create(
        input_ids=_pad([t.token_ids for t in trajectories], pad_token_id, torch.int64),
        lengths=torch.tensor([len(t.token_ids) for t in trajectories], dtype=torch.int64),
        token_mask=_pad([t.token_mask for t in trajectories], 0, torch.bool),
        sample_mask=valid.to(torch.bool) & sampled,
        advantages=advantages.to(torch.float32),
        generation_logprobs=_pad([t.logprobs for t in trajectories], 0.0, torch.float32),
    )


def build_sft_batch(examples: Sequence[tuple[Sequence[int], Sequence[int]]], pad_token_id: int) -> TrainBatch:
    """One row per ``(token_ids, mask)`` pair, mask 1 on the tokens to learn.

    The first token of a row has no prefix and is never learned, whatever its mask says. Advantages
    are 1 and engine log-probabilities 0: a supervised loss reads neither.

    Raises:
        BatchError: no example, an empty one, or a mask of another length than its ids.
    """
    if not examples:
        raise BatchError("a batch needs at least one example")
    for index, (token_ids, mask) in enumerate(examples):
        if not token_ids or len(token_ids) != len(mask):
            raise BatchError(f"example {index} has {len(token_ids)} token ids and {len(mask)} mask entries")
    token_mask = _pad([mask for _, mask in examples], 0, torch.bool)
    token_mask[:, 0] = False
    return TrainBatch.create(
        input_ids=_pad([ids for ids, _ in examples], pad_token_id, torch.int64),
        lengths=torch.tensor([len(ids) for ids, _ in examples], dtype=torch.int64),
        token_mask=token_mask,
        sample_mask=torch.ones(len(examples), dtype=torch.bool),
        advantages=torch.ones(len(examples), dtype=torch.float32),
        generation_logprobs=torch.zeros(token_mask.shape, dtype=torch.float32),
    )


def _pad(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> torch.Tensor:
    padded = torch.full((len(rows), max(len(row) for row in rows)), value, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
