"""A small policy, environment and engine in torch that really learn, behind the loops' protocols."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_algorithms.batching import TrainBatch
from rl_algorithms.metrics import merge_metrics
from rl_gym_bridge.trajectory import RolloutFailure, StopReason, Trajectory, Turn

VOCABULARY = 14
END, START = 12, 13


@dataclass
class TensorView:
    """A LogitsView over given tensors."""

    values: torch.Tensor
    entropies: torch.Tensor | None = None
    entropy_calls: int = 0
    distribution: torch.Tensor | None = None

    def logprobs(self) -> torch.Tensor:
        return self.values

    def entropy(self) -> torch.Tensor:
        self.entropy_calls += 1
        assert self.entropies is not None
        return self.entropies

    def logprobs_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self.distribution is not None
        return self.distribution.gather(2, token_ids)

    def topk_logprobs(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.distribution is not None
        values, ids = self.distribution.topk(k, dim=2)
        return values, ids


class BigramPolicy:
    """Next token from the last one: a table of logits, trained with Adam in micro-batches.

    Adam is written out because importing torch's takes longer than all the tests.
    """

    def __init__(self, micro_batch: int = 4) -> None:
        self.table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        self.updates = 0
        self.first_moment = torch.zeros(VOCABULARY, VOCABULARY)
        self.second_moment = torch.zeros(VOCABULARY, VOCABULARY)
        self.micro_batch = micro_batch
        self.trained: list[TrainBatch] = []

    def _distribution(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.table[ids[:, :-1]], -1)

    def _logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        picked = self._distribution(ids).gather(2, ids[:, 1:, None]).squeeze(2)
        return torch.nn.functional.pad(picked, (1, 0))

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        with torch.no_grad():
            return self._logprobs(batch.input_ids)

    def topk_logits(self, batch: TrainBatch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            values, ids = self._distribution(batch.input_ids).topk(k, dim=2)
        return tuple(torch.nn.functional.pad(part, (0, 0, 1, 0)) for part in (values, ids))

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        uniform = torch.full(batch.input_ids.shape, -float(torch.log(torch.tensor(float(VOCABULARY)))))
        uniform[:, 0] = 0
        return uniform

    def train(self, batch: TrainBatch, loss_fn: Any, *, learning_rate: float) -> dict[str, float]:
        self.trained.append(batch)
        self.table.grad = None
        parts = []
        for start in range(0, len(batch), self.micro_batch):
            part = batch.select(range(start, min(start + self.micro_batch, len(batch))))
            distribution = self._distribution(part.input_ids)
            entropies = torch.nn.functional.pad(-(distribution.exp() * distribution).sum(2), (1, 0))
            everything = torch.nn.functional.pad(distribution, (0, 0, 1, 0))
            view = TensorView(self._logprobs(part.input_ids), entropies, distribution=everything)
            loss, metrics = loss_fn(view, part)
            loss.backward()
            parts.append(metrics)
        norm = torch.nn.utils.clip_grad_norm_([self.table], 1.0)
        self._step(learning_rate)
        merged = {name: metric.value() for name, metric in merge_metrics(parts).items()}
        return {**merged, "grad_norm": float(norm)}

    @torch.no_grad()
    def _step(self, learning_rate: float) -> None:
        assert self.table.grad is not None
        self.updates += 1
        self.first_moment.lerp_(self.table.grad, 0.1)
        self.second_moment.lerp_(self.table.grad.square(), 0.05)
        scale = (self.second_moment / (1 - 0.95**self.updates)).sqrt() + 1e-8
        self.table -= learning_rate * self.first_moment / (1 - 0.9**self.updates) / scale

    def save(self, directory: Path) -> None:
        tensors = {name: getattr(self, name).tolist() for name in self.STORED}
        (directory / "weights.json").write_text(json.dumps({"updates": self.updates, **tensors}))

    def load(self, directory: Path) -> None:
        content = json.loads((directory / "weights.json").read_text())
        self.updates = content["updates"]
        for name in self.STORED:
            getattr(self, name).data.copy_(torch.tensor(content[name]))

    STORED = ("table", "first_moment", "second_moment")


class BigramSource:
    """A row is a token below 6; right is the answer [token + 6, END], and half right its beginning."""

    def __init__(self, policy: BigramPolicy, max_tokens: int = 3) -> None:
        self.policy = policy
        self.max_tokens = max_tokens
        self.calls: list[tuple[int, list[int]]] = []
        self.replace: Callable[[int, Trajectory], Trajectory | RolloutFailure] = lambda step, rollout: rollout

    def rollouts(
        self, rows: Sequence[int], *, group_size: int, step: int, greedy: bool = False, first: int = 0
    ) -> list[Trajectory | RolloutFailure]:
        self.calls.append((step, list(rows)))
        self.logprobs = torch.log_softmax(self.policy.table.detach(), -1).tolist()
        found: list[Trajectory | RolloutFailure] = []
        for place, row in enumerate(rows):
            for member in range(group_size):
                trajectory = self._one(row, group=f"{step}/{first + place}", member=member, greedy=greedy)
                found.append(self.replace(step, trajectory))
        return found

    def _one(self, row: int, *, group: str, member: int, greedy: bool) -> Trajectory:
        chance = random.Random(f"{group}#{member}")
        token, tokens, logprobs = row, [], []
        while len(tokens) < self.max_tokens and token != END:
            distribution = self.logprobs[token]
            if greedy:
                token = max(range(VOCABULARY), key=distribution.__getitem__)
            else:
                (token,) = chance.choices(range(VOCABULARY), [math.exp(value) for value in distribution])
            tokens.append(token)
            logprobs.append(min(distribution[token], 0.0))
        right = 1.0 if tokens == [row + 6, END] else 0.5 if tokens[0] == row + 6 else 0.0
        return Trajectory(
            turns=(Turn((START, row), tuple(tokens), tuple(logprobs)),),
            reward=right,
            stop_reason=StopReason.STOP if token == END else StopReason.LENGTH,
            group_id=group,
            rollout_id=f"{group}/{member}",
        )


class Recorder:
    """A metrics logger that remembers."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entries.append((step, dict(metrics)))

    def series(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.entries if name in metrics]


@dataclass
class World:
    """Everything a loop needs, fresh."""

    policy: BigramPolicy
    source: BigramSource
    recorder: Recorder

    def evaluate(self, step: int) -> dict[str, float]:
        rollouts = self.source.rollouts(range(6), group_size=1, step=0, greedy=True)
        self.source.calls.pop()
        return {"accuracy": sum(isinstance(r, Trajectory) and r.reward == 1.0 for r in rollouts) / 6}


@pytest.fixture
def new_world() -> Callable[[], World]:
    def make() -> World:
        policy = BigramPolicy()
        return World(policy, BigramSource(policy), Recorder())

    return make


@pytest.fixture
def world(new_world: Callable[[], World]) -> World:
    return new_world()


@pytest.fixture
def tensor_view() -> type[TensorView]:
    return TensorView


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """A trajectory from ``(prompt ids, sampled ids)`` turns, log-probability −0.5 everywhere."""

    def make(
        *turns: tuple[Sequence[int], Sequence[int]],
        reward: float | None = 1.0,
        stop_reason: StopReason = StopReason.STOP,
        group_id: str = "g",
        rollout_id: str = "r",
    ) -> Trajectory:
        return Trajectory(
            turns=tuple(Turn(tuple(p), tuple(s), (-0.5,) * len(s)) for p, s in turns),
            reward=reward,
            stop_reason=stop_reason,
            group_id=group_id,
            rollout_id=rollout_id,
        )

    return make
