"""Rollouts as the token sequences that a batch holds: usually one each, more where one forked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_gym_bridge.trajectory import Trajectory


@dataclass(frozen=True, eq=False, slots=True)
class Sequences:
    """R sequences of N rollouts, each rollout's own followed by its forks.

    Attributes:
        trajectories: R of them.
        rollout: ``[R]`` int64, which rollout each belongs to.
        first: ``[R]`` bool, whether it is the rollout's own and no fork.
    """

    trajectories: list[Trajectory]
    rollout: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, rollouts: Sequence[Trajectory]) -> Sequences:
        trajectories = [sequence for t in rollouts for sequence in (t, *t.forks)]
        rollout = [index for index, t in enumerate(rollouts) for _ in range(1 + len(t.forks))]
        first = [place == 0 for t in rollouts for place in range(1 + len(t.forks))]
        return cls(
            trajectories,
            torch.tensor(rollout, dtype=torch.int64),
            torch.tensor(first, dtype=torch.bool),
        )

    @property
    def forked(self) -> bool:
        """Whether any rollout has more than one."""
        return not bool(self.first.all())
