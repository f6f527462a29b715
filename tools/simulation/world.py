"""A world in which a controller lives and dies: fake engine, environments and disk, and one seed for all."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rl_algorithms.controller import (
    Abort,
    Begin,
    Cancel,
    Command,
    Controller,
    ControllerSettings,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    GroupsSaved,
    Publish,
    Published,
    RolloutEnded,
    Save,
    Saved,
    SaveGroups,
    Snapshot,
    Start,
    StopRequested,
    Tick,
    Train,
    Trained,
    Try,
)
from rl_algorithms.replay import Group, Missing
from rl_gym_bridge.trajectory import FailureKind

# No history of these sizes needs a tenth of it.
_TOO_MANY_EVENTS = 50_000
# Without checkpoints on the way a run that is killed often enough never gets anywhere.
_MOST_KILLS = 20


class Violation(AssertionError):
    """The controller broke one of its promises."""


@dataclass(frozen=True)
class Hazards:
    """What may go wrong in a history, and how often. Probabilities unless said otherwise."""

    infra: float = 0.0
    data: float = 0.0
    stuck: float = 0.0
    slow: float = 0.0
    twice: float = 0.0
    after_cancel: float = 0.0
    unknown_versions: float = 0.0
    #: Expected number in a history.
    kills: float = 0.0
    stops: float = 0.0
    clock_jumps: float = 0.0


@dataclass(frozen=True)
class Sample:
    """What a fake rollout gives: the weights that sampled its tokens, and whose they are."""

    position: int
    oldest: tuple[int, int]
    newest: tuple[int, int]


@dataclass
class Disk:
    """What survives a kill."""

    checkpoint: tuple[str, tuple[Group, ...]] | None = None
    version: int = -1
    groups: dict[int, list[Group]] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a history came to."""

    log: str
    kills: int = 0
    stops: int = 0
    jumps: int = 0
    events: int = 0
    refits_in_flight: int = 0
    trained: int = 0
    restored: int = 0
    counters: dict[str, float] = field(default_factory=dict)


class World:
    """One history, from the first start to the last step, through all deaths in between.

    Args:
        settings: of the controller.
        hazards: what may go wrong.
        seed: decides everything.
    """

    def __init__(self, settings: ControllerSettings, hazards: Hazards, seed: int) -> None:
        self.settings = settings
        self.hazards = hazards
        self._random = random.Random(seed)
        self._log = hashlib.sha256()
        self._disk = Disk()
        self._life = 0
        # The life that made the weights of each version, and the rows that each step trained.
        self._lineage: list[int] = [0]
        self._ledger: list[list[int]] = []
        self._outcome = Outcome("")
        self._expected_events = settings.rows * settings.group_size + 20
        self._new_life()

    def run(self) -> Outcome:
        """Live until the target steps are done.

        Raises:
            Violation: of a promise; says which.
        """
        while not self._finished:
            self._outcome.events += 1
            if self._outcome.events > _TOO_MANY_EVENTS:
                raise Violation(f"no end in sight: {self._controller.describe()}")
            self._next()
        trained = sorted(itertools.chain.from_iterable(self._ledger))
        if trained != list(range(self.settings.rows)):
            raise Violation(f"trained {trained}, wanted each of {self.settings.rows} rows once")
        self._outcome.log = self._log.hexdigest()
        self._outcome.trained = len(trained)
        self._outcome.counters = self._controller.counters.to_json()
        return self._outcome

    def _new_life(self) -> None:
        self._life += 1
        self._now = 0.0
        self._wall = self._random.random() * 1e6
        self._serial = itertools.count()
        self._future: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._cancelled: set[tuple[int, int, int]] = set()
        self._stop_asked = self._finished = False
        snapshot: Snapshot | None = None
        groups: list[Group] = []
        if self._disk.checkpoint is not None:
            content, ready = self._disk.checkpoint
            snapshot = Snapshot.from_json(json.loads(content), ready)
            groups = self._disk.groups.get(snapshot.version, [])
            del self._ledger[snapshot.version :]
            del self._lineage[snapshot.version + 1 :]
        else:
            self._ledger.clear()
            del self._lineage[1:]
        self._controller = Controller(self.settings, snapshot, groups)
        self._outcome.restored += self._controller.ready
        self._served = self._controller.version
        self._deliver(Begin(measured=snapshot is not None, saved=snapshot is not None))

    def _next(self) -> None:
        if self._outcome.kills < _MOST_KILLS and self._hazard(self.hazards.kills):
            self._outcome.kills += 1
            self._new_life()
            return
        if self._hazard(self.hazards.clock_jumps):
            self._outcome.jumps += 1
            self._wall += self._random.choice((-3600.0, 100.0, 1e5))
        if not self._stop_asked and self._hazard(self.hazards.stops):
            self._outcome.stops += 1
            self._stop_asked = True
            self._deliver(StopRequested())
            return
        timer = self._controller.next_timer()
        if not self._future and timer is None:
            raise Violation(f"nothing runs and no timer is armed: {self._controller.describe()}")
        due = float("inf") if timer is None else timer - self._wall
        if self._future and self._future[0][0] <= due:
            self._now, _, happens = heapq.heappop(self._future)
            event = happens()
            if event is not None:
                self._deliver(event)
        else:
            self._now = max(self._now, due)
            self._deliver(Tick())

    def _hazard(self, expected: float) -> bool:
        return self._random.random() < expected / self._expected_events

    def _deliver(self, event: Event) -> None:
        self._note(repr(event))
        for command in self._controller.handle(event, self._now + self._wall):
            self._note(repr(command))
            self._carry_out(command)

    def _note(self, line: str) -> None:
        self._log.update(f"{self._life} {self._now:.6f} {line}\n".encode())

    def _carry_out(self, command: Command) -> None:
        match command:
            case Start(position, tries):
                for one in tries:
                    self._start(position, one)
            case Cancel(position, tries):
                for one in tries:
                    if self._random.random() >= self.hazards.after_cancel:
                        self._cancelled.add((position, one.index, one.number))
            case Train(version, groups):
                self._check(version, groups)
                self._later(0.3 + self._random.random(), lambda: self._trained(version, groups))
            case Publish(version):
                self._later(0.1 * self._random.random(), lambda: self._published(version))
            case Evaluate(version):
                self._later(0.2, lambda: Evaluated(version))
            case Save(version):
                snapshot = self._controller.snapshot()
                if snapshot.version != version:
                    raise Violation(f"a checkpoint of version {version} holds {snapshot.version}")
                content = json.dumps(snapshot.to_json()), snapshot.ready
                self._later(0.3 * self._random.random(), lambda: self._saved(version, content))
            case SaveGroups(anchor, groups):
                self._later(0.1, lambda: self._groups_saved(anchor, groups))
            case Finish(stopped):
                if stopped:
                    self._check_stopped()
                    self._new_life()
                else:
                    self._finished = True
            case Abort(reason):
                raise Violation(f"gave up although everything answers: {reason}")

    def _later(self, delay: float, happens: Callable[[], Event | None]) -> None:
        heapq.heappush(self._future, (self._now + delay, next(self._serial), happens))

    def _start(self, position: int, one: Try) -> None:
        if not 0 <= position < self.settings.rows:
            raise Violation(f"row {position} of {self.settings.rows} was begun")
        began = self._served
        weights = (began, self._lineage[began])
        hazards, draw = self.hazards, self._random.random
        if draw() < hazards.stuck:
            return
        seconds = self._random.expovariate(1.0) * (20.0 if draw() < hazards.slow else 1.0)
        known = draw() >= hazards.unknown_versions
        kind: FailureKind | None = None
        if (luck := draw()) < hazards.infra:
            kind = FailureKind.INFRA
        elif luck < hazards.infra + hazards.data:
            kind = FailureKind.DATA

        def ends() -> Event | None:
            if (position, one.index, one.number) in self._cancelled:
                return None
            if kind is not None:
                return RolloutEnded(position, one.index, one.number, f"failed: {kind.value}", failure=kind)
            newest = (self._served, self._lineage[self._served])
            self._outcome.refits_in_flight += newest != weights
            sample = Sample(position, weights, newest)
            versions: dict[str, Any] = {"oldest": began, "newest": newest[0]} if known else {}
            return RolloutEnded(position, one.index, one.number, sample, **versions)

        self._later(seconds, ends)
        if draw() < hazards.twice:
            self._later(seconds + self._random.expovariate(0.5), ends)

    def _check(self, version: int, groups: tuple[Group, ...]) -> None:
        settings = self.settings
        if len(groups) != settings.prompts_per_step or version != len(self._ledger) + 1:
            raise Violation(f"step {version} after {len(self._ledger)} has {len(groups)} groups")
        for group in groups:
            if len(group.outcomes) != settings.group_size:
                raise Violation(f"group {group.position} has {len(group.outcomes)} outcomes")
            for outcome in group.outcomes:
                if isinstance(outcome, Missing | str):
                    continue
                assert isinstance(outcome, Sample)
                if outcome.position != group.position:
                    raise Violation(f"group {group.position} holds a rollout of row {outcome.position}")
                if version - 1 - outcome.oldest[0] > settings.max_staleness:
                    raise Violation(f"step {version} trains a token of version {outcome.oldest[0]}")
                for of_version, life in (outcome.oldest, outcome.newest):
                    if self._lineage[of_version] != life:
                        raise Violation(f"step {version} trains a token of weights that are lost")

    def _trained(self, version: int, groups: tuple[Group, ...]) -> Event:
        self._ledger.append([group.position for group in groups])
        self._lineage.append(self._life)
        return Trained(version)

    def _published(self, version: int) -> Event:
        self._served = version
        return Published(version)

    def _saved(self, version: int, content: tuple[str, tuple[Group, ...]]) -> Event:
        self._disk.checkpoint, self._disk.version = content, version
        self._disk.groups = {version: []}
        return Saved(version)

    def _groups_saved(self, anchor: int, groups: tuple[Group, ...]) -> Event:
        # A newer checkpoint may be there by now; it needs none of them.
        self._disk.groups.setdefault(anchor, []).extend(groups)
        return GroupsSaved()

    def _check_stopped(self) -> None:
        if self._disk.version != self._controller.version:
            raise Violation(
                f"it stopped at version {self._controller.version}, its checkpoint is of {self._disk.version}"
            )
