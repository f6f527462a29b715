"""In-process environments as a runner of rollouts: what is written for a Gym runs without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .answers.outcomes import failure_of
from .chat import ChatModel
from .config import EffortLevel, RewardPenalties
from .dataset import GymRow
from .environment import LocalEnvironment
from .episode import Episode
from .failures import GymConfigError
from .identity import sampling_seed
from .local import environment_of, take_turn
from .penalties import PenaltyTaker
from .request_body import extras_of
from .requests import RolloutRequest, RolloutResult
from .trajectory import RolloutFailure


class LocalRunner:
    """A :class:`~rl_gym_bridge.requests.RolloutRunner` of in-process environments.

    All rollouts that are not finished take their next turn together, in one ``model.chat`` call, in a thread
    beside the event loop; whoever leaves early does not stop a call that runs. A model that raises makes the
    unfinished rollouts failures of the kind INFRA.

    Args:
        environments: by the name that rows give in ``agent_ref.name``.
        model: what to sample from.
        max_new_tokens: sampled tokens per turn at most, where a request does not say.
        temperature: what the model samples with; a request may ask for it or for 0, which is greedy.
        top_p: what the model samples with.
        penalties: taken from the rewards.
        effort_levels: those that requests may name, with their budgets and prices.
    """

    def __init__(
        self,
        environments: Mapping[str, LocalEnvironment],
        model: ChatModel,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        penalties: RewardPenalties | None = None,
        effort_levels: Sequence[EffortLevel] = (),
    ) -> None:
        self._environments = environments
        self._model = model
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._penalties = PenaltyTaker(penalties or RewardPenalties(), effort_levels)

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        """Exactly one result per request, each after the turn in which it ended.

        Raises:
            EnvironmentDefinitionError: a row names an environment that is not there.
            GymConfigError: a request asks for something that a chat model cannot be told.
            ChatModelError: the model broke its contract.
        """
        began = time.monotonic()
        running = [(request, self._episode(request)) for request in requests]
        turn = 0
        while running:
            active = [episode for _, episode in running if episode.outcome is None]
            if active:
                turn += 1
                await asyncio.to_thread(
                    take_turn, active, self._model, name=f"turn {turn}", on_model_error="record"
                )
            ended = [(request, episode) for request, episode in running if episode.outcome is not None]
            running = [(request, episode) for request, episode in running if episode.outcome is None]
            for request, episode in ended:
                yield self._result(request, episode, time.monotonic() - began)

    def _episode(self, request: RolloutRequest) -> Episode:
        row = replace(GymRow.from_mapping(request.body), row_id=request.row_id)
        params = row.responses_create_params
        temperature = params.get("temperature")
        self._check(request, "temperature", temperature, (None, 0, self._temperature))
        self._check(request, "top_p", params.get("top_p"), (None, self._top_p))
        extras = extras_of(row)
        seed = extras.pop("seed", None)
        for name, value in extras.items():
            self._check(request, name, value, ())
        return Episode(
            row,
            environment_of(row, self._environments),
            group_id=request.group_id,
            rollout_id=request.rollout_id,
            seed_of_turn=partial(_seed_of_turn, seed, request.row_id),
            max_new_tokens=params.get("max_output_tokens") or self._max_new_tokens,
            greedy=temperature == 0,
        )

    def _check(self, request: RolloutRequest, name: str, value: Any, possible: tuple[Any, ...]) -> None:
        if value not in possible:
            known = [str(entry) for entry in possible if entry is not None]
            raise GymConfigError(
                f"{request.rollout_id} (row {request.row_id!r}) asks for {value!r}, which "
                f"{type(self._model).__name__} cannot be told",
                component=name,
                remedy=f"ask for {' or '.join(known)}" if known else "set it at the model, or leave it out",
            )

    def _result(self, request: RolloutRequest, episode: Episode, seconds: float) -> RolloutResult:
        outcome = episode.outcome
        assert outcome is not None
        if not isinstance(outcome, RolloutFailure):
            try:
                outcome = self._penalties.taken(outcome, request.effort)
            except Exception as error:
                outcome = failure_of(request, error)
        return RolloutResult(request, outcome, seconds=seconds)


def _seed_of_turn(seed: int | None, row_id: str, turn: int) -> int | None:
    """A turn's own seed, from that of its rollout."""
    if seed is None:
        return None
    return sampling_seed(seed=seed, step=0, row_id=row_id, occurrence=0, index=0, turn=turn)
