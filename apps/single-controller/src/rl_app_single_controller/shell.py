"""The controller in the real world: its clock, its commands, and what ends it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

from rl_algorithms.controller import (
    Abort,
    Begin,
    Cancel,
    Command,
    Controller,
    Evaluate,
    Event,
    Finish,
    Publish,
    Save,
    SaveGroups,
    StalledError,
    Start,
    StopRequested,
    Tick,
    Train,
)

from .rollout_pump import RolloutPump
from .train_pump import TrainPump

# How soon a signal is seen.
_LOOK_EVERY_S = 0.1
_REVIVE_EVERY_S = 1.0


class GraceOver(RuntimeError):
    """Somebody asked the run to stop, and what it does takes longer than ``async.grace_s`` allows."""


class Shell:
    """Runs a controller until it is done, stopped, or cannot go on.

    Args:
        controller: the state machine.
        should_stop: asked all the time; the first yes stops the run.
        grace_s: from that yes on; ``None`` waits for as long as it takes.
        clock: seconds.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        grace_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = controller
        self._should_stop = should_stop
        self._grace_s = grace_s
        self._clock = clock
        self._inbox: deque[Event | Exception] = deque()
        self._arrived = asyncio.Event()
        self._stop_by: float | None = None
        self._stopping = False
        self._finished: Finish | None = None

    def post(self, happened: Event | Exception) -> None:
        """Take an event, or what ends the run, from any part; call it on the event loop."""
        self._inbox.append(happened)
        self._arrived.set()

    async def run(self, begin: Begin, rollouts: RolloutPump, trainer: TrainPump) -> bool:
        """Until the end; whether somebody asked for it.

        Raises:
            StalledError: nothing happened for too long.
            GraceOver: it could not stop in time.
            Exception: whatever ended one of the parts, as it was raised.
        """
        self._rollouts, self._trainer = rollouts, trainer
        revive_at = self._clock() + _REVIVE_EVERY_S
        try:
            self._handle(begin)
            while self._finished is None:
                await self._wait()
                self._look_for_a_stop()
                if self._inbox:
                    self._empty_the_inbox()
                else:
                    self._tick()
                if self._clock() >= revive_at:
                    trainer.revive()
                    revive_at = self._clock() + _REVIVE_EVERY_S
        finally:
            trainer.close()
            await rollouts.close()
        return self._finished.stopped

    async def _wait(self) -> None:
        """For an event, a timer, or the time to look for a signal."""
        if self._inbox:
            # Whoever posts needs a turn as well.
            await asyncio.sleep(0)
            return
        self._arrived.clear()
        timer = self._controller.next_timer()
        left = _LOOK_EVERY_S if timer is None else min(timer - self._clock(), _LOOK_EVERY_S)
        try:
            async with asyncio.timeout(max(left, 0.0)):
                await self._arrived.wait()
        except TimeoutError:
            pass

    def _empty_the_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            happened = self._inbox.popleft()
            if isinstance(happened, Exception):
                raise happened
            self._handle(happened)

    def _tick(self) -> None:
        timer = self._controller.next_timer()
        if timer is not None and self._clock() >= timer:
            self._handle(Tick())

    def _look_for_a_stop(self) -> None:
        if not self._stopping and self._should_stop():
            self._stopping = True
            self._stop_by = None if self._grace_s is None else self._clock() + self._grace_s
            self._handle(StopRequested())
        elif self._stop_by is not None and self._clock() > self._stop_by:
            raise GraceOver(f"no safe point within the grace: {self._controller.describe()}")

    def _handle(self, event: Event) -> None:
        for command in self._controller.handle(event, self._clock()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Start():
                self._rollouts.start(command)
            case Cancel():
                self._rollouts.cancel(command)
            case Train() | Publish() | Evaluate() | Save() | SaveGroups():
                self._trainer.carry_out(command, self._controller.snapshot, self._controller.counters)
            case Finish():
                self._finished = command
            case Abort(reason):
                raise StalledError(reason)
            case _:
                assert_never(command)
