"""Micro-batches through megatron's own schedule: once for scores, once for gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from . import cpu_adapter
from .errors import LossError
from .logits_view import HiddenStatesView
from .mcore import DistributedDataParallel, finalize_model_grads, get_forward_backward_func
from .microbatch import Batch, TokenLayout, check_batch
from .model import PolicyModel
from .packing import plan_micro_batches
from .settings import PolicySettings


class Metric(Protocol):
    """A number that survives micro-batching because it carries its own denominator."""

    def merge(self, other: Any) -> Any: ...

    def value(self) -> float: ...


class LossFunction(Protocol):
    """``loss_fn(logits, batch) -> (loss, metrics)``, the loss being a share of the global loss."""

    def __call__(self, logits: Any, batch: Any, /) -> tuple[torch.Tensor, Mapping[str, Metric]]: ...


@dataclass(slots=True)
class Totals:
    """What the micro-batches of one update add up to."""

    loss: float = 0.0
    metrics: dict[str, Metric] = field(default_factory=dict)

    def add(self, loss: float, metrics: Mapping[str, Metric]) -> None:
        self.loss += loss
        for name, metric in metrics.items():
            known = self.metrics.get(name)
            self.metrics[name] = metric if known is None else known.merge(metric)


class Schedule:
    """Runs micro-batches of one model; leaves its mode and configuration as they were."""

    def __init__(self, model: PolicyModel, settings: PolicySettings) -> None:
        self._model = model
        self._settings = settings
        self._device = cpu_adapter.device()

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """``[B, S]`` float32 on the CPU, without gradients.

        Raises:
            BatchError: the batch breaks its contract.
        """
        groups = self._groups(batch)
        result = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        batches = [batch.select(rows) for rows in groups]
        with torch.no_grad(), _mode(self._model, training=False):
            scores = self._run(self._model, batches, lambda view, _batch: view.logprobs(), forward_only=True)
        for rows, score in zip(groups, scores, strict=True):
            result[rows, : score.size(1)] = score.cpu()
        return result

    def accumulate(self, wrapped: DistributedDataParallel, batch: Batch, loss_fn: LossFunction) -> Totals:
        """Add every micro-batch's gradient to the wrapped model's buffers.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: the loss is not a scalar, or not finite.
        """
        config: Any = self._model.config
        totals = Totals()
        batches = [batch.select(rows) for rows in self._groups(batch)]

        def share(view: HiddenStatesView, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, None]:
            loss, metrics = loss_fn(view, batch)
            totals.add(_checked(loss), metrics)
            return loss, torch.zeros((), dtype=torch.int), None

        config.no_sync_func = wrapped.no_sync
        config.finalize_model_grads_func = _finalize_without_scaling
        try:
            with torch.enable_grad(), _mode(self._model, training=True):
                self._run(wrapped, batches, share, forward_only=False)
        finally:
            config.no_sync_func = config.finalize_model_grads_func = None
        return totals

    def _groups(self, batch: Batch) -> list[list[int]]:
        check_batch(batch, self._model.vocab_size)
        return plan_micro_batches(batch.lengths, self._settings, ranks=1)[0]

    def _run(
        self,
        model: PolicyModel | DistributedDataParallel,
        batches: Sequence[Batch],
        consume: Callable[[HiddenStatesView, Batch], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        if not batches:
            return []

        def forward_step(
            iterator: Iterator[Batch], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            with cpu_adapter.outside_device_scope():
                batch = next(iterator)
                layout = TokenLayout.of(batch, self._device, packing=self._settings.packing)
                hidden = self._hidden_states(chunk, layout)
            return hidden, partial(finish, batch, layout)

        def finish(
            batch: Batch, layout: TokenLayout, hidden: torch.Tensor, non_loss_data: bool = False
        ) -> Any:
            with cpu_adapter.outside_device_scope():
                return consume(self._view(hidden, layout), batch)

        with cpu_adapter.device_scope():
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

    def _view(self, hidden: torch.Tensor, layout: TokenLayout) -> HiddenStatesView:
        return HiddenStatesView(
            hidden,
            self._model.head_weight,
            layout,
            temperature=self._settings.temperature,
            chunk_tokens=self._settings.logprob_chunk_tokens,
        )


def _checked(loss: torch.Tensor) -> float:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise LossError(f"a loss function must return a floating-point scalar tensor, got {shape}")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError(
            f"the loss is {value}; look for inf or NaN in the batch's log-probabilities and advantages"
        )
    return value


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
