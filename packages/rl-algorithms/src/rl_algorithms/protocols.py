"""What the loops need from the machinery. Applications bind real engines and policies to these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_gym_bridge.trajectory import RolloutFailure, Trajectory

from .metrics import Metric
from .needs import Needs


class LogitsView(Protocol):
    """A loss's only access to the model's output: never the logits themselves, never a shard.

    Every tensor is ``[B, S]`` float32, differentiable, for the micro-batch being trained; entry
    ``[b, i]`` belongs to token ``i`` of row ``b`` and column 0 is 0. Padding entries are finite.
    """

    def logprobs(self) -> torch.Tensor:
        """Log-probability of each token given its prefix, under the sampling temperature."""
        ...

    def entropy(self) -> torch.Tensor:
        """Entropy, in nats, of the distribution that each token was drawn from."""
        ...

    def topk_logprobs(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, S, k]`` log-probabilities and int64 ids of the k most likely tokens at each position."""
        ...

    def logprobs_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[B, S, K]`` log-probabilities of given int64 ``[B, S, K]`` tokens at each position."""
        ...


class Batch(Protocol):
    """What a policy needs to know of a batch; :class:`rl_algorithms.batching.TrainBatch` is one."""

    @property
    def input_ids(self) -> torch.Tensor:
        """``[B, S]`` int64, right-padded."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """``[B]`` int64, real tokens per row."""
        ...

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows, cut to their longest; the global denominators stay those of the whole batch."""
        ...


class LossFunction(Protocol):
    """``loss_fn(logits, batch) -> (loss, metrics)``.

    The loss of a micro-batch is its *share of the global loss*: sums over the micro-batch divided
    by the global denominators that the batch carries. Adding the shares gives the loss, so nobody
    averages over micro-batches or ranks.
    """

    def __call__(self, logits: LogitsView, batch: Any) -> tuple[torch.Tensor, Mapping[str, Metric]]: ...


class PolicyLoss(LossFunction, Protocol):
    """A loss for rollouts that says what a batch must carry before it can be trained."""

    @property
    def needs(self) -> Needs:
        """What the batch must carry."""
        ...

    @property
    def trains_zero_advantage_rows(self) -> bool:
        """Whether rows with advantage 0 have a gradient (a KL or entropy term) and must be computed."""
        ...


class Teacher(Protocol):
    """Another policy whose opinion of the rollouts is learnt from."""

    def logprobs(self, batch: Batch, agents: Sequence[str]) -> torch.Tensor:
        """``[B, S]`` float32 log-probability of each token; column 0 is 0.

        ``agents`` names the environment of each row, for teachers that differ by task.
        """
        ...

    def topk_logprobs(self, batch: Batch, agents: Sequence[str], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, S, k]`` float32 log-probabilities and int64 ids of its top k tokens; column 0 is 0."""
        ...


class PolicyTrainer(Protocol):
    """The policy side of a loop."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """``[B, S]`` float32 log-probabilities under the current weights; column 0 is 0."""
        ...

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """As :meth:`logprobs`, under the frozen reference weights."""
        ...

    def train(self, batch: Batch, loss_fn: LossFunction, *, learning_rate: float) -> dict[str, float]:
        """One optimizer update over the whole batch; metrics with ``loss`` and ``grad_norm``."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and random state into an existing, empty directory."""
        ...

    def load(self, directory: Path) -> object:
        """Restore what :meth:`save` wrote; a loop makes no use of what is returned."""
        ...


class RolloutSource(Protocol):
    """Rows in, rollouts out: an environment and an engine bound together."""

    def rollouts(
        self, rows: Sequence[Any], *, group_size: int, step: int, greedy: bool = False, first: int = 0
    ) -> list[Trajectory | RolloutFailure]:
        """``group_size`` rollouts of each row, rows in order and each group contiguous.

        ``step`` seeds the sampling, so that a step repeated after a resume samples the same tokens.
        ``first`` is how many rows of the step were played before these: ids and seeds differ by it.
        """
        ...


class MetricsLogger(Protocol):
    """Takes one step's metrics. The step index is the caller's, never a counter of the logger."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
