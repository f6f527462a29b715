"""Rollouts of in-process environments: every model call of a batch goes to the engine at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from .chat import ChatModel, ChatModelError, ChatReply, ChatRequest, PromptRejected
from .dataset import GymRow
from .environment import (
    EnvironmentDefinitionError,
    LocalEnvironment,
    RolloutResponse,
    Tool,
    ToolError,
    Verdict,
)
from .episode import Episode
from .identity import group_name, rollout_name, sampling_seed
from .suggestions import did_you_mean
from .trajectory import FailureKind, RolloutFailure, Trajectory

__all__ = [
    "EnvironmentDefinitionError",
    "LocalEnvironment",
    "RolloutResponse",
    "Tool",
    "ToolError",
    "Verdict",
    "run_local_rollouts",
]


def run_local_rollouts(
    rows: Sequence[GymRow],
    environments: Mapping[str, LocalEnvironment],
    model: ChatModel,
    *,
    group_size: int,
    step: int,
    seed: int,
    max_new_tokens: int,
    greedy: bool = False,
    group_prefix: str = "train",
    first: int = 0,
    on_model_error: Literal["raise", "record"] = "raise",
) -> list[Trajectory | RolloutFailure]:
    """``group_size`` rollouts of each row; rows in order, each group contiguous.

    All rollouts that are not finished take their next turn together, in one ``model.chat`` call.
    Always ``len(rows) * group_size`` outcomes: what fails is a :class:`RolloutFailure` in its place.

    Args:
        rows: the tasks; one may appear several times.
        environments: by the name that rows give in ``agent_ref.name``.
        model: what to sample from.
        group_size: rollouts per row, ≥ 1.
        step: with ``seed`` it determines the sampling seeds, and with ``group_prefix`` the ids.
        seed: of the run.
        max_new_tokens: sampled tokens per *turn* at most, ≥ 1.
        greedy: decode greedily.
        group_prefix: first part of the ids; give training and evaluation different ones.
        first: how many rows of this step were played before these; their ids and seeds are not used again.
        on_model_error: an exception of the model is raised as :class:`ChatModelError`, or
            (``"record"``, for callers that retry) makes the unfinished rollouts infra failures.

    Raises:
        EnvironmentDefinitionError: a row names an environment that is not there (before sampling).
        ChatModelError: the model raised, or broke its contract (the latter whatever
            ``on_model_error`` says).
        ValueError: ``group_size`` or ``max_new_tokens`` below 1.
    """
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(
            f"group_size and max_new_tokens must be at least 1, got {group_size} and {max_new_tokens}"
        )
    episodes: list[Episode] = []
    occurrences: Counter[str] = Counter()
    for position, row in enumerate(rows):
        environment = environment_of(row, environments)
        group = group_name(group_prefix, step, first + position)
        for index in range(group_size):
            occurrence = first + occurrences[row.row_id]
            seed_of_turn = partial(_seed_of_turn, seed, step, row.row_id, occurrence, index)
            episodes.append(
                Episode(
                    row,
                    environment,
                    group_id=group,
                    rollout_id=rollout_name(group, index),
                    seed_of_turn=seed_of_turn,
                    max_new_tokens=max_new_tokens,
                    greedy=greedy,
                )
            )
        occurrences[row.row_id] += 1
    turn = 0
    while active := [episode for episode in episodes if episode.outcome is None]:
        turn += 1
        take_turn(active, model, name=f"turn {turn} of step {step}", on_model_error=on_model_error)
    return [episode.outcome for episode in episodes if episode.outcome is not None]


def take_turn(
    active: Sequence[Episode], model: ChatModel, *, name: str, on_model_error: Literal["raise", "record"]
) -> None:
    """The next turn of every episode, in one call of the model.

    Args:
        active: episodes without an outcome.
        model: what to sample from.
        name: of the turn, for errors.
        on_model_error: see :func:`run_local_rollouts`.

    Raises:
        ChatModelError: see :func:`run_local_rollouts`.
    """
    requests = [episode.request() for episode in active]
    try:
        replies = model.chat(requests)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if on_model_error == "raise":
            raise ChatModelError(
                f"{type(model).__name__} failed in {name} with {len(requests)} requests ({what})"
            ) from error
        for episode in active:
            episode.fail(FailureKind.INFRA, f"the model failed in {name}: {what}")
        return
    _check_replies(replies, requests, model)
    for episode, reply in zip(active, replies, strict=True):
        episode.take(reply)


def _seed_of_turn(seed: int, step: int, row_id: str, occurrence: int, index: int, turn: int) -> int:
    return sampling_seed(seed=seed, step=step, row_id=row_id, occurrence=occurrence, index=index, turn=turn)


def environment_of(row: GymRow, environments: Mapping[str, LocalEnvironment]) -> LocalEnvironment:
    """The environment that a row names.

    Raises:
        EnvironmentDefinitionError: there is none of that name.
    """
    environment = environments.get(row.agent)
    if environment is None:
        known = f"known: {', '.join(sorted(environments)) or 'none'}"
        hint = did_you_mean(row.agent, environments) or known
        raise EnvironmentDefinitionError(
            f"row {row.row_id!r} wants the environment {row.agent!r}, which is not there; {hint}"
        )
    return environment


def _check_replies(
    replies: Sequence[ChatReply | PromptRejected], requests: Sequence[ChatRequest], model: ChatModel
) -> None:
    if len(replies) != len(requests):
        raise ChatModelError(
            f"{type(model).__name__}.chat returned {len(replies)} replies for {len(requests)} requests; "
            f"it must return exactly one per request, in order"
        )
    for index, reply in enumerate(replies):
        if not isinstance(reply, (ChatReply, PromptRejected)):
            raise ChatModelError(
                f"{type(model).__name__}.chat returned a {type(reply).__name__} as reply {index}; "
                f"it must return ChatReply or PromptRejected"
            )
