"""The vocabulary that every part of the stack shares: turns, trajectories and failed rollouts.

Pure Python and immutable, so that a Gym author needs nothing else to read or make one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .routed_experts import RoutedExperts as RoutedExperts

# Engines round: a certain token may come back a little above 0.
LARGEST_LOGPROB = 1e-4


class StopReason(str, Enum):
    """Why a rollout ended. Truncation is this value, never a guess from lengths or last tokens.

    ``ABORTED`` is a rollout that something other than the policy broke off and that stands for what was
    sampled before: a content filter of the environment's, or a prompt that stopped extending the rollout
    where the turns before it are kept. An *engine* that aborts a request is another thing: nothing is known
    of its answer, so the rollout is a :class:`RolloutFailure` of the kind INFRA and no trajectory.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_LIMIT = "tool_limit"
    ENVIRONMENT_FAILURE = "environment_failure"
    ABORTED = "aborted"

    @property
    def truncated(self) -> bool:
        """Whether the policy was cut off before it ended its answer itself."""
        return self in (StopReason.LENGTH, StopReason.TOOL_LIMIT, StopReason.ABORTED)


class TrajectoryError(ValueError):
    """A turn or trajectory that contradicts itself."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a rollout.

    Attributes:
        prompt_token_ids: only the tokens that are *new* in this turn's prompt (template, user
            and tool text). The policy did not sample them; they are never trained on.
        generation_token_ids: the tokens that the policy sampled, exactly as the engine made them.
        generation_logprobs: natural-log probability of each sampled token under the distribution
            that it was sampled from; same length as ``generation_token_ids``.
        invalid_tool_call: the answer holds a tool call written as text instead of made.
        malformed_thinking: the answer's thinking tags do not match, or stand where the answer should.

    Raises:
        TrajectoryError: ids and log-probabilities differ in number, or a log-probability is not a
            finite number ≤ 0 (rounding up to 1e-4 above 0 is tolerated).
    """

    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]
    generation_logprobs: tuple[float, ...]
    invalid_tool_call: bool = False
    malformed_thinking: bool = False

    def __post_init__(self) -> None:
        if len(self.generation_token_ids) != len(self.generation_logprobs):
            raise TrajectoryError(
                f"a turn has {len(self.generation_token_ids)} sampled tokens but "
                f"{len(self.generation_logprobs)} log-probabilities; they must correspond one to one"
            )
        if are_logprobs(self.generation_logprobs):
            return
        for index, logprob in enumerate(self.generation_logprobs):
            if not math.isfinite(logprob) or logprob > LARGEST_LOGPROB:
                raise TrajectoryError(
                    f"sampled token {index} has log-probability {logprob}, not a finite number <= 0"
                )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished rollout: what was shown, what was sampled, what it earned.

    Attributes:
        turns: in order; concatenating ``prompt_token_ids + generation_token_ids`` of each turn
            gives the exact token sequence.
        reward: the environment's reward, or ``None`` when it gave none (the rollout is then
            neither in a baseline nor trained).
        stop_reason: why the rollout ended.
        group_id: the identity of the group (all rollouts of one row in one step); advantages are
            computed within it, never by prompt text or position.
        rollout_id: unique in its run.
        agent: name of the environment that produced it.
        weight_versions: version of the weights that sampled each token, one per sampled token in
            order, or empty when unknown.
        reward_components: named parts of the reward.
        metrics: numbers that the environment reports (tool calls, format checks, …).
        text: the final assistant text, for people.
        routed_experts: which experts the router chose for each token from the first on (the last one, which
            no model has read, may lack); ``None`` unless the run replays the router.
        forks: further token sequences of the same rollout, where its context was rewritten and not extended.
            They share its reward: what theirs say of it does not count.
    """

    turns: tuple[Turn, ...]
    reward: float | None
    stop_reason: StopReason
    group_id: str
    rollout_id: str
    agent: str = ""
    weight_versions: tuple[int, ...] = ()
    reward_components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    routed_experts: RoutedExperts | None = None
    forks: tuple[Trajectory, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns:
            raise TrajectoryError(f"rollout {self.rollout_id} has no turn")
        if self.reward is not None and not math.isfinite(self.reward):
            raise TrajectoryError(f"rollout {self.rollout_id} has reward {self.reward}")
        if self.weight_versions and len(self.weight_versions) != self.sampled_tokens:
            raise TrajectoryError(
                f"rollout {self.rollout_id} has {len(self.weight_versions)} weight versions for "
                f"{self.sampled_tokens} sampled tokens"
            )
        for fork in self.forks:
            if (fork.rollout_id, fork.group_id) != (self.rollout_id, self.group_id) or fork.forks:
                raise TrajectoryError(
                    f"rollout {self.rollout_id} of group {self.group_id} has a fork {fork.rollout_id} of "
                    f"group {fork.group_id}; forks carry the ids of their rollout and do not fork themselves"
                )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole sequence, prompt and sampled tokens of every turn in order."""
        return tuple(
            token
            for turn in self.turns
            for part in (turn.prompt_token_ids, turn.generation_token_ids)
            for token in part
        )

    @property
    def token_mask(self) -> tuple[int, ...]:
        """1 on each token of ``token_ids`` that the policy sampled, 0 elsewhere."""
        return tuple(
            flag
            for turn in self.turns
            for flag in (0,) * len(turn.prompt_token_ids) + (1,) * len(turn.generation_token_ids)
        )

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The engine's log-probability on each sampled token of ``token_ids``, 0.0 elsewhere."""
        return tuple(
            value
            for turn in self.turns
            for value in (0.0,) * len(turn.prompt_token_ids) + turn.generation_logprobs
        )

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(len(turn.generation_token_ids) for turn in self.turns)


def are_logprobs(values: Sequence[float]) -> bool:
    """Whether all are finite and ≤ 0; at C speed, for answers of tens of thousands of tokens."""
    if not values:
        return True
    total = sum(values)
    # A NaN anywhere makes the sum one; without any, min and max are reliable.
    return total == total and min(values) > -math.inf and max(values) <= LARGEST_LOGPROB


class FailureKind(str, Enum):
    """Who is at fault. Unknown faults count as DATA, so that they are loud."""

    INFRA = "infra"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A rollout that produced no sample. It is counted and reported, never turned into a reward."""

    group_id: str
    rollout_id: str
    agent: str
    kind: FailureKind
    error: str
