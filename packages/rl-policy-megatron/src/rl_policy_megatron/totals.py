"""What a loss function is and returns, and what its results over all micro-batches add up to."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .errors import LossError
from .placement import Placement


class Metric(Protocol):
    """A number that survives micro-batching because it carries its own denominator.

    Where a policy lies over several processes, metrics are pickled from one to the others.
    """

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

    def require_sendable(self) -> None:
        """Refuse metrics that cannot reach the other ranks.

        Raises:
            LossError: one cannot be pickled; names it.
        """
        for name, metric in self.metrics.items():
            try:
                pickle.dumps(metric)
            except Exception as error:
                raise LossError(
                    f"the metric {name!r} cannot be sent to the other ranks: {error}; "
                    "make it an object of a class at the top of a module"
                ) from error

    def over_ranks(self, placement: Placement) -> Totals:
        """Those of all rows, the same on every rank: merged in the order of the ranks. A collective."""
        if placement.world.size == 1:
            return self
        whole = Totals()
        for part in placement.world.gather_objects(self if placement.speaks else None):
            if isinstance(part, Totals):
                whole.add(part.loss, part.metrics)
        return whole


def checked_loss(loss: Any) -> float:
    """The loss as a number.

    Raises:
        LossError: it is not a finite floating-point scalar.
    """
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise LossError(f"a loss function must return a floating-point scalar tensor, got {shape}")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError(
            f"the loss is {value}; look for inf or NaN in the batch's log-probabilities and advantages"
        )
    return value
