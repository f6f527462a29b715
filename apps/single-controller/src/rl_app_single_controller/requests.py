"""Which rollouts a row is played by: names and seeds that depend on nothing but the run and the row."""

from __future__ import annotations

from collections.abc import Sequence

from rl_algorithms.controller import Try
from rl_algorithms.loops.rows import rows_at
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.identity import sampling_seed
from rl_gym_bridge.request_body import GenerationOverrides, request_body
from rl_gym_bridge.requests import RolloutRequest


class RowRequests:
    """The requests of rows by their positions in the order of the run's draws.

    Args:
        rows: to draw from.
        seed: of the run.
        generation: how the run samples.
    """

    def __init__(self, rows: Sequence[GymRow], seed: int, generation: GenerationOverrides) -> None:
        self._rows = rows
        self._seed = seed
        self._generation = generation

    def row(self, position: int) -> GymRow:
        """The row at a position."""
        (index,) = rows_at(position, 1, row_count=len(self._rows), seed=self._seed)
        return self._rows[index]

    def __call__(self, position: int, tries: Sequence[Try]) -> list[RolloutRequest]:
        """One request per try, in order. A try that follows another samples anew."""
        row = self.row(position)
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
                    body=request_body(row, self._generation, effort=None, seed=seed),
                )
            )
        return requests
