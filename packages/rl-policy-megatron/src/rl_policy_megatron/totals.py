"""What the results of a loss function over all micro-batches, and over all ranks, add up to."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field

from .answers import Answer, Metric
from .errors import LossError
from .placement import Placement


@dataclass(slots=True)
class Totals:
    """What the micro-batches of one update add up to.

    Attributes:
        loss: the sum of the shares.
        metrics: merged, by name.
        answers: micro-batches that are in it.
        learns: whether the loss of any of them leads back to the weights.
        name: of the loss function, for messages.
    """

    loss: float = 0.0
    metrics: dict[str, Metric] = field(default_factory=dict)
    answers: int = 0
    learns: bool = False
    name: str = "the loss function"

    def add(self, answer: Answer) -> None:
        """One more micro-batch.

        Raises:
            LossError: its metrics have other names than those before, or do not merge with them.
        """
        self._add(answer.value, answer.metrics, 1, answer.learns)

    def numbers(self) -> dict[str, float]:
        """The values of the metrics.

        Raises:
            LossError: one of them has none; names it.
        """
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            try:
                found[name] = float(metric.value())
            except Exception as error:
                raise LossError(
                    f"{self.name}: value() of the metric {name!r}, {metric!r}, gave no number: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return found

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
        """Those of all rows, the same on every rank: merged in the order of the ranks. A collective.

        Raises:
            LossError: ranks have metrics that do not go together; all of them raise it.
        """
        if placement.world.size == 1:
            return self
        whole = Totals(name=self.name)
        for part in placement.world.gather_objects(self if placement.speaks else None):
            if isinstance(part, Totals) and part.answers:
                whole._add(part.loss, part.metrics, part.answers, part.learns)
        return whole

    def require_gradient(self) -> None:
        """Refuse an update in which no loss leads back to the weights.

        Raises:
            LossError: there were micro-batches, and none had a gradient.
        """
        if self.answers and not self.learns:
            raise LossError(
                f"{self.name} returned losses without gradient only, so nothing would be learned; compute "
                "them from logits.logprobs() without detach(), item() or torch.no_grad()"
            )

    def _add(self, loss: float, metrics: Mapping[str, Metric], answers: int, learns: bool) -> None:
        if metrics and self.metrics and metrics.keys() != self.metrics.keys():
            odd = ", ".join(sorted(metrics.keys() ^ self.metrics.keys()))
            raise LossError(
                f"{self.name} returned other metrics for one micro-batch than for those before ({odd} in "
                "some only); return the same names each time, with a count of 0 where there is nothing"
            )
        self.metrics |= {name: self._merged(name, metric) for name, metric in metrics.items()}
        self.loss += loss
        self.answers += answers
        self.learns = self.learns or learns

    def _merged(self, name: str, metric: Metric) -> Metric:
        if name not in self.metrics:
            return metric
        known = self.metrics[name]
        try:
            return known.merge(metric)
        except Exception as error:
            raise LossError(
                f"{self.name}: the metric {name!r} was {known!r} and then {metric!r}, which do not merge: "
                f"{type(error).__name__}: {error}"
            ) from error
