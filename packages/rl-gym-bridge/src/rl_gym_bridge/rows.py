"""Gym rows as a data set, and as the requests for a step's rollouts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, overload

from .config import EffortLevel
from .dataset import GymRow, load_rows
from .effort import choose_effort
from .errors import DatasetError
from .identity import group_name, rollout_name, sampling_seed
from .media import check_media
from .request_body import (
    GenerationOverrides,
    check_history_is_kept,
    check_levels_fit_the_run,
    request_body,
)
from .requests import RolloutRequest


class NemoGymDataset(Sequence[GymRow]):
    """The rows of a JSONL file, or given ones, by position and by id.

    Ids are stable: a row's own ``row_id``, or one made of its content. Where a run stands in its data is the
    caller's to keep; a position or an id is all it needs.

    Raises:
        DatasetError: two rows have one id, or a row points to a file or to a host that is not allowed, or
            sets an extra that takes earlier thinking out of the prompt.
    """

    def __init__(self, rows: Iterable[GymRow], *, allowed_media_hosts: Collection[str] = ()) -> None:
        self._rows = tuple(rows)
        self._positions: dict[str, int] = {}
        for position, row in enumerate(self._rows):
            if row.row_id in self._positions:
                raise DatasetError(
                    f"{row.row_id!r} is the id of rows {self._positions[row.row_id]} and {position}",
                    field="row_id",
                    remedy="give every row an id of its own",
                )
            self._positions[row.row_id] = position
            check_media(row.responses_create_params, allowed_hosts=allowed_media_hosts, row_id=row.row_id)
            check_history_is_kept(row)

    @classmethod
    def from_jsonl(
        cls,
        path: str | os.PathLike[str],
        *,
        default_agent: str | None = None,
        allowed_media_hosts: Collection[str] = (),
    ) -> NemoGymDataset:
        """The rows of a file; see :func:`~rl_gym_bridge.dataset.load_rows`."""
        return cls(load_rows(path, default_agent=default_agent), allowed_media_hosts=allowed_media_hosts)

    @overload
    def __getitem__(self, index: int) -> GymRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[GymRow, ...]: ...
    def __getitem__(self, index: int | slice) -> GymRow | tuple[GymRow, ...]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def by_id(self, row_id: str) -> GymRow:
        """The row with this id.

        Raises:
            KeyError: there is none.
        """
        return self._rows[self._positions[row_id]]

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that the rows name, each once, in order of appearance."""
        return tuple(dict.fromkeys(row.agent for row in self._rows))


def nemo_gym_data_processor(
    row: GymRow,
    *,
    generation: GenerationOverrides,
    group_size: int,
    step: int,
    seed: int,
    position: int = 0,
    occurrence: int = 0,
    group_prefix: str = "train",
    effort_levels: Sequence[EffortLevel] = (),
    allowed_media_hosts: Collection[str] = (),
) -> list[RolloutRequest]:
    """The requests of one group, in rollout order.

    What the row says reaches the agent key by key as it is, apart from the run's overrides and the effort
    level.

    Args:
        row: the task; not changed.
        generation: how the run samples.
        group_size: rollouts of the row, ≥ 1.
        step: of the run; with ``group_prefix`` and ``position`` it makes the ids.
        seed: of the run.
        position: of the row among those of the step.
        occurrence: how often the same row came before in this step.
        group_prefix: first part of the ids; give training and evaluation different ones.
        effort_levels: of the run; the whole group gets one.
        allowed_media_hosts: hosts that media may come from.

    Raises:
        DatasetError: the row cannot be sent.
        GymConfigError: an effort level contradicts ``generation``.
        ValueError: ``group_size`` below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    check_levels_fit_the_run(generation, effort_levels)
    check_media(row.responses_create_params, allowed_hosts=allowed_media_hosts, row_id=row.row_id)
    effort = choose_effort(row, effort_levels, seed=seed, step=step, occurrence=occurrence)
    group = group_name(group_prefix, step, position)
    shared = None if generation.seeded else request_body(row, generation, effort=effort, seed=None)

    def body(index: int) -> dict[str, Any]:
        if shared is not None:
            return shared
        own = sampling_seed(
            seed=seed, step=step, row_id=row.row_id, occurrence=occurrence, index=index, turn=0
        )
        return request_body(row, generation, effort=effort, seed=own)

    return [
        RolloutRequest(
            rollout_id=rollout_name(group, index),
            group_id=group,
            row_id=row.row_id,
            agent=row.agent,
            body=body(index),
            effort=effort.name if effort else "",
        )
        for index in range(group_size)
    ]


def collate_rollout_requests(
    rows: Sequence[GymRow],
    *,
    generation: GenerationOverrides,
    group_size: int,
    step: int,
    seed: int,
    group_prefix: str = "train",
    effort_levels: Sequence[EffortLevel] = (),
    allowed_media_hosts: Collection[str] = (),
    first: int = 0,
) -> list[list[RolloutRequest]]:
    """One list of requests per row, in the order of the rows; see :func:`nemo_gym_data_processor`.

    Nothing is sent before every row has been checked. ``first`` is how many rows of this step were played
    before these; their ids and seeds are not used again.
    """
    groups: list[list[RolloutRequest]] = []
    occurrences: Counter[str] = Counter()
    for position, row in enumerate(rows):
        groups.append(
            nemo_gym_data_processor(
                row,
                generation=generation,
                group_size=group_size,
                step=step,
                seed=seed,
                position=first + position,
                occurrence=first + occurrences[row.row_id],
                group_prefix=group_prefix,
                effort_levels=effort_levels,
                allowed_media_hosts=allowed_media_hosts,
            )
        )
        occurrences[row.row_id] += 1
    return groups
