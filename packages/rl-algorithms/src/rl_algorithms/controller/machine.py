"""The controller: which rows are played, which groups are trained when, and what a failure changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rl_gym_bridge.trajectory import FailureKind

from ..replay import Group, Missing
from ..staleness import admission_capacity, lag
from .clock import ControllerClock, Timer
from .commands import Abort, Cancel, Command, Finish, Start, Try
from .errors import ControllerError
from .events import (
    Begin,
    Evaluated,
    Event,
    GroupsSaved,
    Published,
    RolloutEnded,
    Saved,
    StopRequested,
    Trained,
)
from .journal import GroupJournal
from .play import Play
from .restoring import Rows
from .selection import Selection
from .settings import ControllerSettings
from .snapshot import Snapshot
from .trainer import TrainerWork


class Controller:
    """Overlaps rollouts and training within a bound on staleness.

    Give it events in the order in which they happen, carry out the commands that it returns, and give it a
    ``Tick`` when :meth:`next_timer` has come. It plays the rows 0 to ``settings.rows`` − 1 of the run's draws
    and no other, each until its group is trained exactly once; so a run that was killed and resumed trains
    the rows that an uninterrupted one trains.

    Args:
        settings: of the run.
        snapshot: what a checkpoint holds, to go on from.
        groups: finished groups that were saved beside that checkpoint. Those whose weights the checkpoint has
            not seen are of no use: they belong to steps that are lost.
    """

    def __init__(
        self, settings: ControllerSettings, snapshot: Snapshot | None = None, groups: Sequence[Group] = ()
    ) -> None:
        snapshot = snapshot or Snapshot()
        self.settings = settings
        self.counters = replace(snapshot.counters)
        self._clock = ControllerClock()
        self._overslept_before = snapshot.counters.overslept_s
        self._rows = Rows.of(settings, snapshot, groups)
        self.counters.discarded_groups += self._rows.discarded
        self._buffer = self._rows.buffer
        self._trainer = TrainerWork(settings, snapshot.version)
        self._journal = GroupJournal()
        self._changed = True
        self._stopping = self._over = False
        self._progress_at = 0.0
        self._out: list[Command] = []

    @property
    def version(self) -> int:
        """Trained steps."""
        return self._trainer.version

    @property
    def running(self) -> int:
        """Rows that are being played."""
        return len(self._rows.plays)

    @property
    def ready(self) -> int:
        """Finished groups that wait to be trained."""
        return self._buffer.waiting

    @property
    def over(self) -> bool:
        """Whether it has said ``Finish`` or ``Abort``; nothing more will come."""
        return self._over

    @property
    def capacity(self) -> int:
        """Rows that may be begun now, as far as staleness goes."""
        return admission_capacity(
            max_staleness=self.settings.max_staleness,
            version=self._trainer.served,
            batch=self.settings.prompts_per_step,
            accepted=self._buffer.accepted,
            running=self._buffer.running,
        )

    def next_timer(self) -> float | None:
        """When it wants a ``Tick`` at the latest, by the clock that its events are given with."""
        return None if self._over else self._clock.next_due

    def snapshot(self) -> Snapshot:
        """What a checkpoint of now has to hold; only between steps, as when ``Save`` is asked for."""
        rows = [play.history for play in (*self._rows.plays.values(), *self._rows.owed.values())]
        return Snapshot(
            version=self.version,
            next_position=self._rows.next_position,
            trained=self._buffer.trained.copy(),
            ready=tuple(self._buffer.ready),
            histories=tuple(sorted(rows, key=lambda row: row.position)),
            counters=replace(self.counters),
        )

    def describe(self) -> str:
        """Where it stands, for a person who wonders what it waits for."""
        return (
            f"version {self.version}, the engine has {self._trainer.served}; {self.running} rows are played, "
            f"{self.ready} groups are ready, {len(self._rows.owed)} rows wait to be played again, room for "
            f"{self.capacity}; the trainer {self._trainer.describe()}"
        )

    def handle(self, event: Event, now: float) -> list[Command]:
        """What has to be done about an event, in this order.

        Args:
            event: what happened.
            now: seconds of any clock.

        Raises:
            ControllerError: an event that cannot have happened, or a sampler that broke its contract.
        """
        if self._over:
            return []
        self._out = []
        self._clock.advance(now)
        self.counters.overslept_s = self._overslept_before + self._clock.overslept
        self._take(event)
        for timer in self._clock.due():
            self._on_timer(timer)
        self._go_on()
        return self._out

    # What happened

    def _take(self, event: Event) -> None:
        match event:
            case RolloutEnded():
                self._rollout_ended(event)
                return
            case Begin():
                self._trainer.begin(event)
                self._clock.arm(self.settings.stall_timeout_s, "stall")
                if self.settings.save_groups_every_s is not None:
                    self._clock.arm(self.settings.save_groups_every_s, "groups")
            case Trained():
                self._trainer.trained(event.version)
                self._give_up_what_is_too_old()
            case Published():
                self._trainer.published(event.version)
            case Evaluated():
                self._trainer.evaluated(event)
            case Saved():
                self._trainer.saved(event.version)
                self._journal.forget_before(self._trainer.saved_serial)
            case GroupsSaved():
                self._journal.written()
            case StopRequested():
                self._stop()
            case _:
                return
        self._progress()

    def _progress(self) -> None:
        self._changed = True
        self._progress_at = self._clock.now

    def _rollout_ended(self, event: RolloutEnded) -> None:
        play = self._rows.plays.get(event.position)
        if play is None or not play.runs(event.index, event.number):
            self.counters.late += 1
            return
        self._progress_at = self._clock.now
        if event.failure is None:
            play.succeed(event.index, event.outcome, event.oldest, event.newest, self._trainer.served)
        else:
            self._failed(play, event.index, event.outcome, event.failure)
        if play.finished:
            self._commit(play)
        # A step that is short of rollouts may have enough now.
        self._changed |= play.overdue

    def _failed(self, play: Play, index: int, outcome: object, kind: FailureKind) -> None:
        failures = play.fail(index, outcome, kind, self.settings.retry)
        if failures is None:
            return
        if kind is FailureKind.INFRA:
            self.counters.infra_retries += 1
        else:
            self.counters.data_retries += 1
        delay = self.settings.retry.delay_s(failures, self.settings.seed, play.position, index)
        self._clock.arm(delay, "retry", play.position, index, play.next_number(index))

    def _commit(self, play: Play) -> None:
        position = play.position
        del self._rows.plays[position]
        self._rows.finished[position] = play
        group = play.group(self._rows.next_serial, self._trainer.served)
        self._rows.next_serial += 1
        self._buffer.commit(group)
        self._journal.add(group)
        self._changed = True

    def _stop(self) -> None:
        self._stopping = True
        for play in list(self._rows.plays.values()):
            self._take_back(play)
        self._trainer.stop()

    # What time brings

    def _on_timer(self, timer: Timer) -> None:
        if timer.kind == "stall":
            self._look_for_a_stall()
            return
        if timer.kind == "groups":
            self._save_groups()
            return
        play = self._rows.plays.get(timer.position)
        if play is None:
            return
        if timer.kind == "retry" and play.waits_for_retry(timer.index, timer.number):
            self._start(play, (play.start(timer.index, self._trainer.served, self._clock.now),))
        elif timer.kind == "rollout":
            self._end_the_too_long(play)
        elif timer.kind == "straggler" and timer.number == play.replays:
            self._straggles(play)

    def _look_for_a_stall(self) -> None:
        idle = self._clock.now - self._progress_at
        if idle < self.settings.stall_timeout_s:
            self._clock.arm(self.settings.stall_timeout_s - idle, "stall")
            return
        self._over = True
        self._out.append(Abort(f"nothing has happened for {idle:.0f} s: {self.describe()}"))

    def _save_groups(self) -> None:
        assert self.settings.save_groups_every_s is not None
        self._clock.arm(self.settings.save_groups_every_s, "groups")
        if not self._trainer.is_saving and (task := self._journal.due(self._trainer.last_saved)):
            self._out.append(task)

    def _end_the_too_long(self, play: Play) -> None:
        limit = self.settings.rollout_timeout_s
        while (found := play.longest_running()) is not None:
            one, began = found
            if not self._clock.has_come(began + limit):
                return
            self.counters.timeouts += 1
            # Its budget bounds how often.
            self._progress_at = self._clock.now
            self._cancel(play, (one,))
            why = Missing(one.index, f"try {one.number} took longer than {limit:g} s")
            self._failed(play, one.index, why, FailureKind.INFRA)
        if play.finished:
            self._commit(play)

    def _straggles(self, play: Play) -> None:
        policy = self.settings.straggler
        if policy == "shrink":
            play.overdue = self._changed = True
        elif policy == "replace" and play.replaced < self.settings.max_replays:
            self.counters.straggler_rows += 1
            self._cancel(play, play.stop_running())
            play.replaced += 1
            play.order = self._rows.next_order
            self._rows.next_order += 1
            self._begin(play)
            self._changed = True
        elif policy == "replace":
            self._close(play)

    def _close(self, play: Play) -> None:
        """Let the group be what it is, without those of its rollouts that are not done."""
        self._cancel(play, play.stop_running())
        self.counters.stragglers += self.settings.group_size - play.ended
        self._commit(play)

    # What is to be done

    def _go_on(self) -> None:
        if self._over:
            return
        self._train()
        if not self._stopping:
            self._admit()
        task = self._trainer.next_task(self._rows.next_serial)
        if task is not None:
            self._out.append(task)
        elif self._trainer.idle and (self._stopping or self._trainer.done):
            self._over = True
            self._out.append(Finish(stopped=not self._trainer.done))

    def _train(self) -> None:
        if not self._trainer.idle or self._trainer.done or self._stopping or not self._changed:
            return
        self._changed = False
        chosen = Selection(
            self.settings,
            version=self.version,
            served=self._trainer.served,
            ready=self._buffer.ready,
            finished=self._rows.finished,
            plays=self._rows.plays.values(),
            owed=self._rows.owed.values(),
        ).choose()
        if chosen is None:
            return
        for position in chosen:
            if position in self._rows.plays:
                self._close(self._rows.plays[position])
        groups = self._buffer.take(chosen)
        for group in groups:
            del self._rows.finished[group.position]
            if self._too_old(group.oldest):
                raise ControllerError(
                    f"group {group.position} of version {group.oldest} was chosen for the step after version "
                    f"{self.version}; max_staleness is {self.settings.max_staleness}"
                )
        self._out.append(self._trainer.train(groups))

    def _admit(self) -> None:
        room = self.capacity
        if self.settings.max_running is not None:
            room = min(room, self.settings.max_running - len(self._rows.plays))
        while room > 0 and self._trainer.served >= 0:
            if self._rows.owed:
                play = self._rows.owed.pop(
                    min(self._rows.owed, key=lambda position: self._rows.owed[position].order)
                )
            elif self._rows.next_position < self.settings.rows:
                play = Play(self._rows.next_position, self.settings.group_size, self._rows.next_position)
                self._rows.next_position += 1
            else:
                return
            self._buffer.reserve(play.position)
            self._rows.plays[play.position] = play
            self._begin(play)
            room -= 1

    def _begin(self, play: Play) -> None:
        self._start(play, play.start_all(self._trainer.served, self._clock.now))
        if self.settings.straggler != "wait":
            self._clock.arm(
                self.settings.straggler_timeout_s, "straggler", play.position, number=play.replays
            )

    def _start(self, play: Play, tries: tuple[Try, ...]) -> None:
        self._out.append(Start(play.position, tries))
        self._clock.arm(self.settings.rollout_timeout_s, "rollout", play.position)

    def _cancel(self, play: Play, tries: tuple[Try, ...]) -> None:
        if tries:
            self._out.append(Cancel(play.position, tries))

    def _give_up_what_is_too_old(self) -> None:
        """What can never be trained any more is played again, with the weights of then."""
        for group in self._buffer.ready:
            if self._too_old(group.oldest):
                self._buffer.remove(group.position)
                self._play_again(self._rows.finished.pop(group.position))
        for play in list(self._rows.plays.values()):
            if self._too_old(play.oldest(self._trainer.served)):
                self._take_back(play)
                self._play_again(play)

    def _play_again(self, play: Play) -> None:
        play.forget()
        play.stale += 1
        self.counters.stale_rows += 1
        self._rows.owed[play.position] = play

    def _take_back(self, play: Play) -> None:
        self._cancel(play, play.forget())
        self._buffer.remove(play.position)
        del self._rows.plays[play.position]
        self._rows.owed[play.position] = play

    def _too_old(self, oldest: int) -> bool:
        return lag(self.version, oldest) > self.settings.max_staleness
