"""Where a controller goes on: what was finished is kept, what was begun is owed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..replay import Group, ReplayBuffer
from ..staleness import lag
from .play import Play
from .settings import ControllerSettings
from .snapshot import Snapshot


@dataclass(slots=True)
class Rows:
    """The rows of a run that have been drawn.

    Attributes:
        buffer: which of them are played, finished, trained.
        plays: those that are being played, by position.
        finished: how those that wait to be trained were played.
        owed: those that wait to be played again.
        next_position: of the first that was not drawn.
        next_order: behind all that wait to be trained.
        next_serial: of the next group that is finished.
        discarded: finished groups that could not be kept.
    """

    buffer: ReplayBuffer
    next_position: int
    next_order: int
    plays: dict[int, Play] = field(default_factory=dict)
    finished: dict[int, Play] = field(default_factory=dict)
    owed: dict[int, Play] = field(default_factory=dict)
    next_serial: int = 0
    discarded: int = 0

    @classmethod
    def of(cls, settings: ControllerSettings, snapshot: Snapshot, groups: Sequence[Group]) -> Rows:
        """Those of a snapshot, and of groups that were finished after it.

        A group is kept if the snapshot's weights are at least as new as those that sampled it: later ones are
        of steps that are lost.
        """
        rows = cls(ReplayBuffer(snapshot.trained.copy()), snapshot.next_position, settings.rows)
        for group in (*snapshot.ready, *groups):
            if group.position not in rows.buffer:
                rows._keep(group, settings, snapshot.version)
        histories = {row.position: row for row in snapshot.histories}
        for position in range(rows.next_position):
            if position not in rows.buffer:
                known = histories.get(position)
                blank = Play(position, settings.group_size, position)
                rows.owed[position] = Play.of(known, settings.group_size) if known else blank
        return rows

    def _keep(self, group: Group, settings: ControllerSettings, version: int) -> None:
        usable = group.newest <= version and lag(version, group.oldest) <= settings.max_staleness
        of_this_run = group.position < settings.rows and len(group.outcomes) == settings.group_size
        if not (usable and of_this_run):
            self.discarded += 1
            return
        self.buffer.reserve(group.position)
        self.buffer.commit(replace(group, serial=self.next_serial))
        self.finished[group.position] = Play(group.position, settings.group_size, group.order)
        self.next_serial += 1
        self.next_order = max(self.next_order, group.order + 1)
        self.next_position = max(self.next_position, group.position + 1)
