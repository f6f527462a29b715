"""Which rollouts a row is played by: names and seeds that depend on nothing but the run and the row."""

from __future__ import annotations

from collections.abc import Sequence

from rl_algorithms.controller import Try
from rl_algorithms.loops.rows import rows_at
from rl_app_core.preflight import Prepared
from rl_gym_bridge.config import EffortLevel
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.effort import choose_effort
from rl_gym_bridge.identity import sampling_seed
from rl_gym_bridge.request_body import GenerationOverrides, request_body
from rl_gym_bridge.requests import RolloutRequest


class RowRequests:
    """The requests of rows by their positions in the order of the run's draws.

    Args:
        rows: to draw from.
        seed: of the run.
        generation: how the run samples.
        effort_levels: that rows may ask for.
    """

    def __init__(
        self,
        rows: Sequence[GymRow],
        seed: int,
        generation: GenerationOverrides,
        effort_levels: Sequence[EffortLevel] = (),
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._generation = generation
        self._effort_levels = tuple(effort_levels)

    def row(self, position: int) -> GymRow:
        """The row at a position."""
        (index,) = rows_at(position, 1, row_count=len(self._rows), seed=self._seed)
        return self._rows[index]

    def __call__(self, position: int, tries: Sequence[Try]) -> list[RolloutRequest]:
        """One request per try, in order. A try that follows another samples anew."""
        row = self.row(position)
        effort = choose_effort(row, self._effort_levels, seed=self._seed, step=position, occurrence=0)
        group = f"train/{position}"
        requests: list[RolloutRequest] = []
        for one in tries:
            seed = sampling_seed(
                seed=self._seed,
                step=position,
                row_id=row.row_id,
                occurrence=one.number,
                index=one.index,
                turn=0,
            )
            requests.append(
                RolloutRequest(
                    rollout_id=f"{group}/{one.index}" + (f"/{one.number}" if one.number else ""),
                    group_id=group,
                    row_id=row.row_id,
                    agent=row.agent,
                    body=request_body(
                        row,
                        self._generation,
                        effort=effort,
                        seed=seed if self._generation.seeded else None,
                    ),
                    effort=effort.name if effort else "",
                )
            )
        return requests


def row_requests(prepared: Prepared) -> RowRequests:
    """Those of a run, played by its Gym or in process."""
    config, rows = prepared.config, prepared.problems.train
    if prepared.gym is not None:
        return RowRequests(rows, config.seed, prepared.gym.sampling, prepared.gym.effort_levels)
    generation = config.generation
    sampling = GenerationOverrides(
        temperature=generation.temperature,
        top_p=generation.top_p,
        max_new_tokens=generation.max_new_tokens,
        seeded=True,
    )
    return RowRequests(rows, config.seed, sampling)
