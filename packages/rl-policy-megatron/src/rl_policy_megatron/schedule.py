"""Micro-batches through megatron's own schedule: once for scores, once for gradients.

Every rank is given the whole batch. It takes the rows of its data-parallel group, runs its stage of the
model on them, and hands out results that are complete and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import cpu_adapter
from .agreement import Lockstep, agreed, raise_together
from .answers import LossFunction, check_callable, checked_answer, name_of
from .errors import BatchError
from .logits_view import HiddenStatesView, checked_top
from .mcore import (
    DistributedDataParallel,
    copy_to_tensor_model_parallel_region,
    finalize_model_grads,
    gather_from_sequence_parallel_region,
    get_forward_backward_func,
)
from .microbatch import Batch, TokenLayout, check_batch, selected
from .model import PolicyModel
from .packing import plan_micro_batches
from .placement import Placement
from .quiet import quiet_megatron
from .refusals import alike, marked
from .settings import PolicySettings
from .totals import Totals
from .vocabulary import VocabularyShard


@dataclass(frozen=True, slots=True)
class _NoRows:
    """What a rank computes with where the others have rows left: collectives need it, results do not."""

    input_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    lengths: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def select(self, rows: Sequence[int]) -> _NoRows:
        return self


class Schedule:
    """Runs micro-batches of one model; leaves its mode and configuration as they were."""

    def __init__(
        self,
        model: PolicyModel,
        settings: PolicySettings,
        vocabulary: int | None = None,
        placement: Placement | None = None,
        positions: int | None = None,
    ) -> None:
        """A schedule for one model on this rank.

        Args:
            model: this rank's part.
            settings: how it computes.
            vocabulary: the number of real tokens: a model split among ranks has padding beyond them.
            placement: this process's groups; by default a world of its own.
            positions: longest row to be accepted; by default any.
        """
        self._model = model
        self._settings = settings
        self._placement = placement or Placement()
        self._vocabulary = VocabularyShard(vocabulary or model.vocab_size, self._placement.tensor)
        self._positions = positions
        self._device = cpu_adapter.device()

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """``[B, S]`` float32 on the CPU, without gradients.

        Raises:
            BatchError: the batch breaks its contract.
        """
        (scores,) = self._collected(batch, lambda view: (view.logprobs(),), [((), torch.float32)])
        return scores

    def topk(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, S, k]`` float32 log-probabilities and int64 token ids on the CPU, most likely first.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: ``k`` is no integer between 1 and the size of the vocabulary.
        """
        with alike():
            k = checked_top(k, self._vocabulary.size)
        wanted = [((k,), torch.float32), ((k,), torch.int64)]
        scores, token_ids = self._collected(batch, lambda view: view.topk_logprobs(k), wanted)
        return scores, token_ids

    def token_logits(self, batch: Batch) -> torch.Tensor:
        """``[B, S, V]`` float32 on the CPU, without gradients, 0 at padding; all at once.

        Raises:
            BatchError: the batch breaks its contract.
        """
        self._check(batch)
        rows, width = batch.input_ids.shape
        result = torch.zeros(rows, width, self._vocabulary.size, dtype=torch.float32, device=self._device)
        if not batch.input_ids.numel():
            return result.cpu()
        ids, lengths = batch.input_ids.to(self._device), batch.lengths.to(self._device)
        padding = torch.arange(width, device=self._device) >= lengths[:, None]
        ids = torch.nn.functional.pad(ids.masked_fill(padding, 0), (0, -width % self._pad_to))
        positions = torch.arange(ids.size(1), device=self._device).expand_as(ids)
        with torch.no_grad(), _mode(self._model, training=False):
            outputs = self._run(
                self._model,
                [batch],
                lambda chunk, _layout: chunk(ids, positions, None),
                lambda logits, _layout, _batch: torch.cat(self._vocabulary.ranks.gather(logits), dim=-1),
                forward_only=True,
            )
        if self._placement.pipeline.last:
            result = outputs[0][:, :width, : self._vocabulary.size].float()
            result = result.masked_fill_(padding[:, :, None], 0)
        pipeline = self._placement.pipeline
        return pipeline.broadcast(result, pipeline.size - 1).cpu()

    def accumulate(self, wrapped: DistributedDataParallel, batch: Batch, loss_fn: LossFunction) -> Totals:
        """Add every micro-batch's gradient to the wrapped model's buffers, on every rank those of all rows.

        A loss function that raises on one rank makes all ranks raise once the schedule is through.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: the loss function, or what it returned, breaks its contract.
            PeerError: another rank's loss function failed.
        """
        config: Any = self._model.config
        world = self._placement.world
        with agreed(world):
            check_callable(loss_fn)
        totals = Totals(name=name_of(loss_fn))
        failures: list[Exception] = []
        _, batches = self._micro_batches(batch)

        def share(
            hidden: torch.Tensor, layout: TokenLayout, batch: Batch
        ) -> tuple[torch.Tensor, torch.Tensor, None]:
            lockstep = Lockstep(self._placement.tensor)
            view = self._view(hidden, layout, lockstep)
            loss = view.nothing()
            if not failures and not isinstance(batch, _NoRows):
                try:
                    with lockstep.section():
                        answer = checked_answer(loss_fn, loss_fn(view, batch))
                        totals.add(answer)
                    loss = loss.to(answer.loss.device) + answer.loss
                except Exception as error:
                    # Other ranks wait for this one in the schedule; alone there is nobody to wait.
                    if world.size == 1:
                        raise
                    failures.append(error)
            return loss, torch.zeros((), dtype=torch.int), None

        config.no_sync_func = wrapped.no_sync
        config.finalize_model_grads_func = _finalize_without_scaling
        try:
            with torch.enable_grad(), _mode(self._model, training=True):
                self._run(wrapped, batches, self._hidden_states, share, forward_only=False)
        finally:
            config.no_sync_func = config.finalize_model_grads_func = None
        if world.size > 1 and not failures:
            try:
                totals.require_sendable()
            except Exception as error:
                failures.append(error)
        raise_together(world, failures[0] if failures else None)
        # The same on every rank, and so is what is wrong with them.
        with alike():
            whole = totals.over_ranks(self._placement)
            if bool((batch.lengths > 1).any()):
                whole.require_gradient()
            whole.numbers()
        return whole

    @property
    def _pad_to(self) -> int:
        return self._placement.tensor.size if self._placement.sequence_parallel else 1

    def _check(self, batch: Batch) -> None:
        """Refuse a batch that breaks its contract, or is not the same on every rank; all raise."""
        world = self._placement.world
        with agreed(world):
            check_batch(batch, self._vocabulary.size, self._positions)
        if world.size == 1:
            return
        seen = [*batch.input_ids.shape, int(batch.lengths.sum()), max(batch.lengths.tolist(), default=0)]
        others = world.gather(torch.tensor(seen, device=self._device))
        for rank, other in enumerate(others):
            if other.tolist() != others[0].tolist():
                raise marked(
                    BatchError(
                        f"rank {rank} was given a batch of {other.tolist()} (rows, columns, tokens, "
                        f"longest), rank 0 one of {others[0].tolist()}; every rank needs the whole batch"
                    )
                )

    def _micro_batches(self, batch: Batch) -> tuple[list[list[int]], list[Batch]]:
        """This rank's rows by micro-batch, and these."""
        self._check(batch)
        data = self._placement.data
        plan = plan_micro_batches(batch.lengths, self._settings, ranks=data.size)[data.rank]
        with agreed(self._placement.world):
            return plan, [selected(batch, rows) if rows else _NoRows() for rows in plan]

    def _run(
        self,
        model: PolicyModel | DistributedDataParallel,
        batches: Sequence[Batch],
        forward: Callable[[torch.nn.Module, TokenLayout], torch.Tensor],
        consume: Callable[[torch.Tensor, TokenLayout, Batch], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """What ``consume`` makes of the last stage's outputs; nothing on other stages."""
        if not batches:
            return []

        def forward_step(
            iterator: Iterator[Batch], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            with cpu_adapter.outside_device_scope():
                batch = next(iterator)
                layout = TokenLayout.of(
                    batch, self._device, packing=self._settings.packing, pad_to=self._pad_to
                )
                output = forward(chunk, layout)
            return output, partial(finish, batch, layout)

        def finish(
            batch: Batch, layout: TokenLayout, output: torch.Tensor, non_loss_data: bool = False
        ) -> Any:
            with cpu_adapter.outside_device_scope():
                return consume(output, layout, batch)

        with quiet_megatron(), cpu_adapter.device_scope():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=[model],
                num_microbatches=len(batches),
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _hidden_states(self, model: torch.nn.Module, layout: TokenLayout) -> torch.Tensor:
        ids = layout.model_input
        return model(ids, layout.positions, None, labels=ids, packed_seq_params=layout.packed)

    def _collected(
        self,
        batch: Batch,
        ask: Callable[[HiddenStatesView], Sequence[torch.Tensor]],
        wanted: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ) -> list[torch.Tensor]:
        """What the views of all micro-batches answer, on the CPU: ``[B, S, *width]`` for each that is wanted.

        ``ask`` gets the view of one micro-batch and returns one ``[b, s, *width]`` for each.
        """

        def answer(hidden: torch.Tensor, layout: TokenLayout, _batch: Batch) -> Sequence[torch.Tensor]:
            return ask(self._view(hidden, layout, Lockstep(self._placement.tensor)))

        plan, batches = self._micro_batches(batch)
        results = [torch.zeros(*batch.input_ids.shape, *width, dtype=dtype) for width, dtype in wanted]
        with torch.no_grad(), _mode(self._model, training=False):
            answers = self._run(self._model, batches, self._hidden_states, answer, forward_only=True)
        if self._placement.speaks:
            for rows, parts in zip(plan, answers, strict=True):
                for result, part in zip(results, parts, strict=True):
                    if rows:
                        result[rows, : part.size(1)] = part.cpu()
        # Each row comes from one rank, and the others add nothing to it.
        return [self._placement.world.sum(result.to(self._device)).cpu() for result in results]

    def _view(self, hidden: torch.Tensor, layout: TokenLayout, lockstep: Lockstep) -> HiddenStatesView:
        # Each rank of the vocabulary has a share of the hidden states' gradient: these add them up.
        if self._placement.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        elif self._placement.tensor.size > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return HiddenStatesView(
            hidden,
            self._model.head_weight,
            layout,
            temperature=self._settings.temperature,
            chunk_tokens=self._settings.logprob_chunk_tokens,
            vocabulary=self._vocabulary,
            lockstep=lockstep,
        )


def _finalize_without_scaling(model: list[Any], _num_tokens: Any = None, **groups: Any) -> None:
    """megatron's gradient reduction, less its division: losses are already shares of the global loss."""
    finalize_model_grads(model, None, **groups)


@contextmanager
def _mode(model: torch.nn.Module, *, training: bool) -> Generator[None]:
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
