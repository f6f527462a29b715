"""Rows to rollouts: played by the agents of a Gym, which ask the run's engine over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.failures import GymServerDied
from rl_gym_bridge.requests import RolloutRunner
from rl_gym_bridge.rollout_groups import RolloutGroup
from rl_gym_bridge.rollouts import RolloutBatch, collect_rollouts, stream_nemo_gym_rollouts
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, Trajectory

from .gym_plan import GymPlan
from .rollout_engine import RolloutEngine

_LOOK_EVERY_S = 1.0


class GymRollouts:
    """The :class:`rl_algorithms.protocols.RolloutSource` of a Gym, for training and for measurements.

    Ids and seeds are those of :class:`~rl_app_core.rollouts.LocalRollouts`: the same rows in the same step
    get the same ones, whatever was played before.

    Args:
        runner: the Gym.
        engine: what it asks; it is given the policy's newest weights before anything is asked, and replicas
            that come back meanwhile get them too.
        plan: of the Gym.
        seed: of the run.
        check: raises if the Gym is no more; asked where a rollout was lost to its death.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        engine: RolloutEngine,
        plan: GymPlan,
        *,
        seed: int,
        check: Callable[[], object],
    ) -> None:
        self._runner = runner
        self._engine = engine
        self._plan = plan
        self._seed = seed
        self._check = check

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
        """See :class:`rl_algorithms.protocols.RolloutSource`; ``group_prefix`` names the groups.

        Raises:
            GymServerDied: a process of Gym is gone, and with it this Gym.
            GymError: no rollout can be had.
            GenerationError: no replica took the weights, or none is left.
        """
        self._engine.refresh()
        groups = stream_nemo_gym_rollouts(
            self._runner,
            rows,
            group_size=group_size,
            step=step,
            seed=self._seed,
            generation=self._plan.greedy if greedy else self._plan.sampling,
            group_prefix=group_prefix or ("held_out" if greedy else "train"),
            effort_levels=self._plan.effort_levels,
            first=first,
            timeout_s=self._plan.step_timeout_s,
        )
        version = self._engine.weight_version
        outcomes = asyncio.run(self._beside_the_engine(groups)).outcomes
        if version == self._engine.weight_version:
            outcomes = [_with_version(outcome, version) for outcome in outcomes]
        if any(_was_lost(outcome) for outcome in outcomes):
            # A Gym that died is not started again, so there is no use in going on to the next step.
            self._check()
        return outcomes

    async def _beside_the_engine(self, groups: AsyncGenerator[RolloutGroup, None]) -> RolloutBatch:
        collecting = asyncio.ensure_future(collect_rollouts(groups))
        try:
            while not (await asyncio.wait({collecting}, timeout=_LOOK_EVERY_S))[0]:
                # Gym asks a replica that died until it is back, and that serves only with its weights.
                await asyncio.to_thread(self._engine.refresh)
            return collecting.result()
        finally:
            # Whoever leaves early leaves nothing running: this closes the stream, also in the actor.
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)


def _with_version(outcome: Trajectory | RolloutFailure, version: int) -> Trajectory | RolloutFailure:
    """The rollout with the version that sampled each token, where Gym dropped what the engine said of it.

    It is known all the same: the policy rests while rollouts are played, and a replica with other weights
    serves nothing.
    """
    if isinstance(outcome, RolloutFailure) or outcome.weight_versions:
        return outcome
    return replace(outcome, weight_versions=(version,) * outcome.sampled_tokens)


def _was_lost(outcome: Trajectory | RolloutFailure) -> bool:
    """Whether Gym was found dead under a rollout; one that is only slow or refuses something goes on."""
    if not isinstance(outcome, RolloutFailure):
        return False
    return outcome.kind is FailureKind.INFRA and outcome.error.startswith(GymServerDied.__name__)
