"""Which groups the next step trains: the sampler's choice, held to its contract and to the bound on age."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..replay import Group
from ..staleness import lag
from .errors import ControllerError
from .play import Play
from .settings import ControllerSettings


class Selection:
    """What could be trained now.

    Args:
        settings: of the run.
        version: trained steps.
        served: version that the engine samples from.
        ready: finished groups.
        finished: how each of them was played.
        plays: rows that are being played.
        owed: rows that wait to be played again.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        *,
        version: int,
        served: int,
        ready: Sequence[Group],
        finished: dict[int, Play],
        plays: Iterable[Play],
        owed: Iterable[Play],
    ) -> None:
        self._settings = settings
        self._version = version
        self._served = served
        self._ready = list(ready)
        self._finished = finished
        self._plays = list(plays)
        self._owed = list(owed)

    def choose(self) -> list[int] | None:
        """Positions of the groups of the next step, or ``None`` to wait.

        Some may be those of overdue rows, which have to be closed first.

        Raises:
            ControllerError: the sampler broke its contract.
        """
        settings = self._settings
        count = settings.prompts_per_step
        if self._must_wait():
            return None
        if len(self._ready) >= count and (chosen := self._asked(self._ready, self._plays)) is not None:
            return self._with_those_that_grow_too_old(chosen)
        if settings.straggler != "shrink":
            return None
        overdue = [play for play in self._plays if play.overdue]
        if not overdue or len(self._ready) + len(overdue) < count:
            return None
        closed = [play.group(0, self._served) for play in overdue]
        groups = self._ready + [g for g in closed if lag(self._version, g.oldest) <= settings.max_staleness]
        if len(groups) < count:
            return None
        chosen = self._asked(groups, [play for play in self._plays if not play.overdue])
        if chosen is None:
            return None
        ended = {play.position: play.ended for play in overdue}
        finished = sum(ended.get(position, settings.group_size) for position in chosen)
        enough = finished >= settings.min_batch_fraction * count * settings.group_size
        return self._with_those_that_grow_too_old(chosen) if enough else None

    def _must_wait(self) -> bool:
        """Whether a row that has grown too old again and again would do so once more."""
        return any(
            self._has_had_enough(play) and self._grows_too_old(play.oldest(self._served))
            for play in self._plays
        )

    def _has_had_enough(self, play: Play) -> bool:
        return play.stale > 0 and play.stale >= self._settings.max_replays

    def _grows_too_old(self, oldest: int) -> bool:
        return lag(self._version + 1, oldest) > self._settings.max_staleness

    def _with_those_that_grow_too_old(self, chosen: list[int]) -> list[int]:
        """Put groups that have had enough, and are too old for any later step, in place of the last ones."""
        urgent = [
            group.position
            for group in self._ready
            if group.position not in chosen
            and self._has_had_enough(self._finished[group.position])
            and self._grows_too_old(group.oldest)
        ]
        kept = [p for p in chosen if p in self._finished and self._has_had_enough(self._finished[p])]
        others = [p for p in chosen if p not in kept]
        room = len(chosen) - len(kept)
        return (kept + urgent[:room] + others)[: len(chosen)] if urgent else chosen

    def _asked(self, groups: Sequence[Group], plays: Sequence[Play]) -> list[int] | None:
        count, sampler = self._settings.prompts_per_step, self._settings.sampler
        running = sorted(play.order for play in (*plays, *self._owed))
        found = sampler.choose(tuple(groups), tuple(running), count)
        if found is None:
            return None
        chosen = list(found)
        known = {group.position for group in groups}
        if len(chosen) != count or len(set(chosen)) != count or not set(chosen) <= known:
            raise ControllerError(
                f"{type(sampler).__name__} chose {chosen} of the {len(known)} groups that it was shown; a "
                f"sampler gives exactly {count} of their positions, each once, or None"
            )
        return chosen
