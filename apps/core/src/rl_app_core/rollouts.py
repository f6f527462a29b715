"""Rows to rollouts: in-process environments played by the run's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl_algorithms.evaluation import mean_pass_at_k
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environment import LocalEnvironment
from rl_gym_bridge.local import run_local_rollouts
from rl_gym_bridge.trajectory import RolloutFailure, Trajectory

from .chat_model import EngineChatModel
from .config.sections import Evaluation


class Rollouts(Protocol):
    """A :class:`rl_algorithms.protocols.RolloutSource` whose groups can be named."""

    def rollouts(
        self,
        rows: Sequence[GymRow],
        *,
        group_size: int,
        step: int,
        greedy: bool = False,
        first: int = 0,
        group_prefix: str | None = None,
    ) -> list[Trajectory | RolloutFailure]:
        """As the loop's source; ``group_prefix`` names the groups of those that are not trained on."""
        ...


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
        self,
        rows: Sequence[GymRow],
        *,
        group_size: int,
        step: int,
        greedy: bool = False,
        first: int = 0,
        group_prefix: str | None = None,
    ) -> list[Trajectory | RolloutFailure]:
        """See :class:`rl_algorithms.protocols.RolloutSource`; ``group_prefix`` names the groups."""
        return run_local_rollouts(
            rows,
            self._environments,
            self._model,
            group_size=group_size,
            step=step,
            seed=self._seed,
            max_new_tokens=self._max_new_tokens,
            greedy=greedy,
            group_prefix=group_prefix or ("held_out" if greedy else "train"),
            first=first,
        )


class HeldOutError(RuntimeError):
    """A held-out problem that could not be measured; a share over the others would be another number."""


def measure(
    rollouts: Rollouts, rows: Sequence[GymRow], *, step: int, evaluation: Evaluation
) -> dict[str, float]:
    """Greedy decoding of every row, one rollout each, and sampled answers for pass@k if they are asked for.

    Returns:
        ``accuracy`` (mean reward over exactly ``rows``), ``length`` (mean sampled tokens), the mean of each
        metric that the environment reports, and ``pass@K`` for each K of ``evaluation``.

    Raises:
        HeldOutError: a rollout failed or had no reward.
    """
    scored = _scored(rollouts.rollouts(rows, group_size=1, step=step, greedy=True))
    count = len(scored)
    names = sorted({name for trajectory, _ in scored for name in trajectory.metrics})
    means = {name: sum(t.metrics.get(name, 0.0) for t, _ in scored) / count for name in names}
    return {
        "accuracy": sum(reward for _, reward in scored) / count,
        "length": sum(t.sampled_tokens for t, _ in scored) / count,
        **means,
        **_pass_at(rollouts, rows, step, evaluation),
    }


def _pass_at(
    rollouts: Rollouts, rows: Sequence[GymRow], step: int, evaluation: Evaluation
) -> dict[str, float]:
    samples = evaluation.samples
    if not samples:
        return {}
    scored = _scored(rollouts.rollouts(rows, group_size=samples, step=step, group_prefix="held_out_samples"))
    right = [
        sum(reward >= 1.0 for _, reward in scored[start : start + samples])
        for start in range(0, len(scored), samples)
    ]
    return {f"pass@{k}": mean_pass_at_k(right, samples, k) for k in evaluation.pass_at}


def _scored(outcomes: Sequence[Trajectory | RolloutFailure]) -> list[tuple[Trajectory, float]]:
    scored: list[tuple[Trajectory, float]] = []
    for outcome in outcomes:
        if isinstance(outcome, RolloutFailure):
            raise HeldOutError(
                f"held-out rollout {outcome.rollout_id} failed ({outcome.kind.value}): {outcome.error}"
            )
        if outcome.reward is None:
            raise HeldOutError(f"held-out rollout {outcome.rollout_id} has no reward")
        scored.append((outcome, outcome.reward))
    return scored
