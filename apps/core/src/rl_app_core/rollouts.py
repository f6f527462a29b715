"""Rows to rollouts: in-process environments played by the run's engine."""

from __future__ import annotations

from collections.abc import Sequence

from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environment import LocalEnvironment
from rl_gym_bridge.local import run_local_rollouts
from rl_gym_bridge.trajectory import RolloutFailure, Trajectory

from .chat_model import EngineChatModel


class LocalRollouts:
    """The :class:`rl_algorithms.protocols.RolloutSource` of in-process environments."""

    def __init__(
        self,
        model: EngineChatModel,
        environments: dict[str, LocalEnvironment],
        *,
        seed: int,
        max_new_tokens: int,
    ) -> None:
        self._model = model
        self._environments = environments
        self._seed = seed
        self._max_new_tokens = max_new_tokens

    def rollouts(
        self, rows: Sequence[GymRow], *, group_size: int, step: int, greedy: bool = False, first: int = 0
    ) -> list[Trajectory | RolloutFailure]:
        """See :class:`rl_algorithms.protocols.RolloutSource`."""
        return run_local_rollouts(
            rows,
            self._environments,
            self._model,
            group_size=group_size,
            step=step,
            seed=self._seed,
            max_new_tokens=self._max_new_tokens,
            greedy=greedy,
            group_prefix="held_out" if greedy else "train",
            first=first,
        )


class HeldOutError(RuntimeError):
    """A held-out problem that could not be measured; a share over the others would be another number."""


def measure(rollouts: LocalRollouts, rows: Sequence[GymRow], *, step: int) -> dict[str, float]:
    """Greedy decoding of every row, one rollout each.

    Returns:
        ``accuracy`` (mean reward over exactly ``rows``), ``length`` (mean sampled tokens) and the mean
        of each metric that the environment reports.

    Raises:
        HeldOutError: a rollout failed or had no reward.
    """
    outcomes = rollouts.rollouts(rows, group_size=1, step=step, greedy=True)
    scored: list[tuple[Trajectory, float]] = []
    for outcome in outcomes:
        if isinstance(outcome, RolloutFailure):
            raise HeldOutError(f"held-out rollout {outcome.rollout_id} failed: {outcome.error}")
        if outcome.reward is None:
            raise HeldOutError(f"held-out rollout {outcome.rollout_id} has no reward")
        scored.append((outcome, outcome.reward))
    count = len(scored)
    names = sorted({name for trajectory, _ in scored for name in trajectory.metrics})
    means = {name: sum(t.metrics.get(name, 0.0) for t, _ in scored) / count for name in names}
    return {
        "accuracy": sum(reward for _, reward in scored) / count,
        "length": sum(t.sampled_tokens for t, _ in scored) / count,
        **means,
    }
