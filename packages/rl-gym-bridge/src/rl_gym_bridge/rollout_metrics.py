"""What rollouts came to, per agent and per effort level, the same whether counted live or afterwards."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .penalties import RAW_REWARD
from .requests import RolloutResult
from .trajectory import FailureKind, RolloutFailure, Trajectory

_ALL = "all"


class RolloutMetrics:
    """Counts results in any order and in any number of parts.

    Sums are exactly rounded, so the order in which results arrive changes no digit: a live count equals one
    that is made later from the same results. Each result must be added once.
    """

    def __init__(self) -> None:
        self._scopes: defaultdict[str, _Scope] = defaultdict(_Scope)

    @classmethod
    def of(cls, results: Iterable[RolloutResult]) -> RolloutMetrics:
        """The count of the given results."""
        metrics = cls()
        for result in results:
            metrics.add(result)
        return metrics

    def add(self, result: RolloutResult) -> None:
        """Count one result."""
        agent = result.request.agent
        self._scopes[_ALL].add(result)
        self._scopes[agent].add(result)
        if result.request.effort:
            self._scopes[f"{agent}/effort/{result.request.effort}"].add(result)

    def merge(self, other: RolloutMetrics) -> None:
        """Count everything that ``other`` has counted."""
        for name, scope in other._scopes.items():
            self._scopes[name].merge(scope)

    def summary(self) -> dict[str, float]:
        """``<agent>/<measure>``, ``<agent>/effort/<level>/<measure>`` and, over all, ``all/<measure>``.

        Measures: ``rollouts``, ``samples`` (those with a reward), ``without_reward``, ``failures_infra``,
        ``failures_data``, ``attempts``, ``seconds_{mean,max}``; over trajectories ``truncated_share``,
        ``invalid_tool_call_share``, ``malformed_thinking_share``, ``turns_mean``, ``tokens_{mean,max}``
        (sampled ones), ``metric/<name>_mean``; over samples ``reward_{mean,std,min,max}``,
        ``reward_environment_mean`` and ``component/<name>_mean`` (0 where a sample lacks the component).
        What has nothing to be taken over is left out. The standard deviation is that of the population.
        """
        return {
            f"{name}/{measure}": value
            for name, scope in sorted(self._scopes.items())
            for measure, value in scope.summary().items()
        }


@dataclass(slots=True)
class _Scope:
    """The raw values of one agent, or of whatever else is counted apart."""

    rollouts: int = 0
    trajectories: int = 0
    attempts: int = 0
    without_reward: int = 0
    truncated: int = 0
    invalid_tool_call: int = 0
    malformed_thinking: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    raw_rewards: list[float] = field(default_factory=list)
    components: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, result: RolloutResult) -> None:
        self.rollouts += 1
        self.attempts += result.attempts
        self.seconds.append(result.seconds)
        if isinstance(result.outcome, RolloutFailure):
            self.failures[result.outcome.kind] += 1
        else:
            self._add_trajectory(result.outcome)

    def _add_trajectory(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        self.truncated += trajectory.stop_reason.truncated
        self.invalid_tool_call += any(turn.invalid_tool_call for turn in trajectory.turns)
        self.malformed_thinking += any(turn.malformed_thinking for turn in trajectory.turns)
        self.tokens.append(float(trajectory.sampled_tokens))
        self.turns.append(float(len(trajectory.turns)))
        for name, value in trajectory.metrics.items():
            if name != RAW_REWARD:
                self.metrics[name].append(value)
        if trajectory.reward is None:
            self.without_reward += 1
            return
        self.rewards.append(trajectory.reward)
        self.raw_rewards.append(trajectory.metrics.get(RAW_REWARD, trajectory.reward))
        for name, value in trajectory.reward_components.items():
            self.components[name].append(value)

    def merge(self, other: _Scope) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _LISTS:
            getattr(self, name).extend(getattr(other, name))
        self.failures.update(other.failures)
        for name in _LISTS_BY_NAME:
            for key, values in getattr(other, name).items():
                getattr(self, name)[key].extend(values)

    def summary(self) -> dict[str, float]:
        numbers = {
            "rollouts": float(self.rollouts),
            "samples": float(len(self.rewards)),
            "without_reward": float(self.without_reward),
            "attempts": float(self.attempts),
            **{f"failures_{kind.value}": float(self.failures[kind]) for kind in FailureKind},
            "seconds_mean": _mean(self.seconds),
            "seconds_max": max(self.seconds),
        }
        if self.trajectories:
            numbers |= {
                "truncated_share": self.truncated / self.trajectories,
                "invalid_tool_call_share": self.invalid_tool_call / self.trajectories,
                "malformed_thinking_share": self.malformed_thinking / self.trajectories,
                "turns_mean": _mean(self.turns),
                "tokens_mean": _mean(self.tokens),
                "tokens_max": max(self.tokens),
                **{f"metric/{name}_mean": _mean(values) for name, values in sorted(self.metrics.items())},
            }
        if self.rewards:
            numbers |= {
                "reward_mean": _mean(self.rewards),
                "reward_std": _std(self.rewards),
                "reward_min": min(self.rewards),
                "reward_max": max(self.rewards),
                "reward_environment_mean": _mean(self.raw_rewards),
                **{
                    f"component/{name}_mean": math.fsum(values) / len(self.rewards)
                    for name, values in sorted(self.components.items())
                },
            }
        return numbers


_COUNTS = (
    "rollouts",
    "trajectories",
    "attempts",
    "without_reward",
    "truncated",
    "invalid_tool_call",
    "malformed_thinking",
)
_LISTS = ("seconds", "tokens", "turns", "rewards", "raw_rewards")
_LISTS_BY_NAME = ("components", "metrics")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
