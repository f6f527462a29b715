"""What a loss function is and may return, checked where it returns, in messages that name it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .errors import LossError

# What a policy reports of every update, beside the metrics of its loss function. These may have a "loss" of
# their own, the sum of the same shares, in whose place the policy's is reported.
LOSS, GRAD_NORM = "loss", "grad_norm"
_SHOWN_CHARACTERS = 80
_PRECISE = (torch.float32, torch.float64)
_CONTRACT = (
    "it must return (loss, metrics): a float32 scalar tensor with gradient, this micro-batch's share of the "
    "global loss, and a dict of name -> metric, {} for none"
)
_METRIC = (
    "a metric has merge(other) and value() and so carries its own denominator, as "
    "rl_algorithms.metrics.Mean(total, count) does; a plain number would be wrong over several micro-batches"
)


class Metric(Protocol):
    """A number that survives micro-batching because it carries its own denominator.

    Where a policy lies over several processes, metrics are pickled from one to the others.
    """

    def merge(self, other: Any) -> Any: ...

    def value(self) -> float: ...


class LossFunction(Protocol):
    """``loss_fn(logits, batch) -> (loss, metrics)``, the loss being a share of the global loss.

    The loss is a float32 or float64 scalar with a gradient. A micro-batch with nothing to train on may
    have a loss of exactly 0 without one and no metrics, as long as another of the batch has a gradient.
    All others have metrics of the same names; one of none of its tokens is empty and adds nothing.
    """

    def __call__(self, logits: Any, batch: Any, /) -> tuple[torch.Tensor, Mapping[str, Metric]]: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What a loss function returned for one micro-batch.

    Attributes:
        loss: as returned.
        value: of the loss, finite.
        metrics: by name.
    """

    loss: torch.Tensor
    value: float
    metrics: dict[str, Metric]

    @property
    def learns(self) -> bool:
        """Whether there is a way back from the loss to the weights."""
        return self.loss.requires_grad


def name_of(loss_fn: Any) -> str:
    """What to call a loss function in a message."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    named = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    return f"the loss function {named.__module__}.{named.__qualname__}"


def check_callable(loss_fn: Any) -> None:
    """Refuse what cannot be called as a loss function is, before anything is computed.

    Raises:
        LossError: it is no function of two positional arguments.
    """
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise LossError(
            f"a loss function must be callable as loss_fn(logits, batch), got {shown(loss_fn)}"
            + ("; make an object of it" if isinstance(loss_fn, type) else "")
        )
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise LossError(f"{name_of(loss_fn)} must take (logits, batch), it takes {signature}") from error


def checked_answer(loss_fn: Any, returned: Any) -> Answer:
    """What a loss function returned, taken apart.

    Raises:
        LossError: it breaks the contract of :class:`LossFunction`; names the function, what it
            returned, and what is expected.
    """
    name = name_of(loss_fn)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise LossError(f"{name} returned {shown(returned)}; {_CONTRACT}")
    loss, metrics = returned
    value = _checked_loss(name, loss)
    if not isinstance(metrics, Mapping):
        raise LossError(f"{name} returned {shown(metrics)} for metrics; {_CONTRACT}")
    for key, metric in metrics.items():
        if not isinstance(key, str):
            raise LossError(f"{name} named a metric {key!r}; names of metrics are strings")
        if key == GRAD_NORM:
            raise LossError(
                f"{name} named a metric {key!r}, which the policy itself reports and would overwrite; give "
                "it another name"
            )
        if isinstance(metric, type) or not all(
            callable(getattr(metric, part, None)) for part in ("merge", "value")
        ):
            raise LossError(f"{name} returned {shown(metric)} for the metric {key!r}; {_METRIC}")
    return Answer(loss, value, dict(metrics))


def _checked_loss(name: str, loss: Any) -> float:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or loss.dtype not in _PRECISE:
        raise LossError(f"{name} returned {shown(loss)} as its loss, not a float32 scalar; {_CONTRACT}")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError(
            f"{name} returned a loss of {value}; look for inf or NaN in the batch's log-probabilities and "
            "advantages, and for a division by a count that can be 0"
        )
    if value and not loss.requires_grad:
        raise LossError(
            f"{name} returned a loss of {value} without gradient, so nothing would be learned; compute it "
            "from logits.logprobs() without detach(), item() or torch.no_grad()"
        )
    return value


def shown(value: Any) -> str:
    """A value in few words: a tensor by its type and shape, anything long by its beginning."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)) and value:
        inside = ", ".join(shown(part) for part in value[:4])
        return f"a {type(value).__name__} of {len(value)} ({inside}{', …' if len(value) > 4 else ''})"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    text = repr(value)
    text = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return f"a {type(value).__name__} ({text})"
