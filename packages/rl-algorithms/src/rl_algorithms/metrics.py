"""Metrics that survive micro-batching: each carries its own numerator and denominator.

A loss returns them per micro-batch; whoever trains merges them across micro-batches and ranks and
only then takes the value, so that no metric is a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """``total / count``; NaN-free: an empty mean is 0."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over the whole batch."""

    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen; an empty one (−inf) reads as 0."""

    maximum: float = -math.inf

    def merge(self, other: Max) -> Max:
        return Max(max(self.maximum, other.maximum))

    def value(self) -> float:
        return self.maximum if math.isfinite(self.maximum) else 0.0


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value seen; an empty one (+inf) reads as 0."""

    minimum: float = math.inf

    def merge(self, other: Min) -> Min:
        return Min(min(self.minimum, other.minimum))

    def value(self) -> float:
        return self.minimum if math.isfinite(self.minimum) else 0.0


@dataclass(frozen=True, slots=True)
class ExpMean:
    """``exp(total / count)``, for multiplicative errors averaged in log space; held below overflow."""

    total: float
    count: float

    def merge(self, other: ExpMean) -> ExpMean:
        return ExpMean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return math.exp(min(self.total / self.count, 700.0)) if self.count else 1.0


Metric = Mean | Sum | Max | Min | ExpMean


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One mapping from many, metric by metric; a name missing from a part adds nothing.

    Raises:
        TypeError: one name carries two kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            known = merged.get(name)
            if known is None:
                merged[name] = metric
            elif type(known) is not type(metric):
                raise TypeError(f"metric {name!r} is a {type(known).__name__} and a {type(metric).__name__}")
            else:
                merged[name] = known.merge(metric)  # type: ignore[arg-type]
    return merged
