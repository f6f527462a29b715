"""The states of an in-process engine: running, paused, asleep, closed; one generation at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from .failures import DeadlineError, GenerationError, InfraError

EngineState = Literal["running", "paused", "asleep", "closed"]


class Lifecycle:
    """Serialises generations and lets other threads pause, put to sleep or close the engine.

    Args:
        component: name that errors begin with.
        wait_timeout_s: the longest that anything waits for its turn or for :meth:`resume`.
    """

    def __init__(self, component: str, wait_timeout_s: float) -> None:
        self._component = component
        self._wait_timeout_s = wait_timeout_s
        self._busy = threading.Lock()
        self._state_changed = threading.Condition()
        self._paused = False
        self._asleep = False
        self._closed = False

    @property
    def state(self) -> EngineState:
        """The state now."""
        if self._closed:
            return "closed"
        if self._asleep:
            return "asleep"
        return "paused" if self._paused else "running"

    @property
    def busy(self) -> bool:
        """Whether a generation is in flight."""
        return self._busy.locked()

    @contextmanager
    def generating(self) -> Generator[None]:
        """Hold the engine for one generation.

        Raises:
            InfraError: closed or asleep.
            DeadlineError: no turn within the deadline.
        """
        self._refuse_unusable()
        if not self._busy.acquire(timeout=self._wait_timeout_s):
            raise DeadlineError(
                f"{self._component}: waited {self._wait_timeout_s:g} s for another generation to end; "
                "send fewer requests at a time or raise wait_timeout_s"
            )
        try:
            self._refuse_unusable()
            yield
        finally:
            self._busy.release()

    @contextmanager
    def idle(self, action: str) -> Generator[None]:
        """Hold the engine for something that must not meet a generation.

        Raises:
            GenerationError: a generation is in flight (said at once, without waiting).
            InfraError: closed.
        """
        self.refuse_closed()
        if not self._busy.acquire(blocking=False):
            raise GenerationError(
                f"{self._component}: cannot {action} while a generation is in flight; "
                "wait for it to return first"
            )
        try:
            yield
        finally:
            self._busy.release()

    def may_go_on(self) -> bool:
        """Whether the generation in flight may take its next step; blocks while paused.

        Raises:
            DeadlineError: the pause outlasted the deadline.
        """
        if not self._paused and not self._closed:
            return True
        deadline = time.monotonic() + self._wait_timeout_s
        with self._state_changed:
            while self._paused and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"{self._component}: paused for more than {self._wait_timeout_s:g} s during "
                        "a generation; call resume() or raise wait_timeout_s"
                    )
                self._state_changed.wait(left)
        return not self._closed

    def pause(self) -> None:
        """Stop before the next step of any generation."""
        self._change(paused=True)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._change(paused=False)

    def sleep(self) -> None:
        """Refuse generations until :meth:`wake`."""
        with self.idle("sleep"):
            self._asleep = True

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.refuse_closed()
        self._asleep = False

    def close(self, timeout_s: float) -> bool:
        """End for good; idempotent. The generation in flight stops before its next step.

        Returns:
            Whether the engine was idle within ``timeout_s``.
        """
        with self._state_changed:
            self._closed = True
            self._state_changed.notify_all()
        if not self._busy.acquire(timeout=max(timeout_s, 0)):
            return False
        self._busy.release()
        return True

    def refuse_closed(self) -> None:
        """Raise :class:`InfraError` after :meth:`close`."""
        if self._closed:
            raise InfraError(f"{self._component}: used after shutdown(); build a new engine")

    def _refuse_unusable(self) -> None:
        self.refuse_closed()
        if self._asleep:
            raise InfraError(f"{self._component}: asleep; call wake() before generating")

    def _change(self, *, paused: bool) -> None:
        self.refuse_closed()
        with self._state_changed:
            self._paused = paused
            self._state_changed.notify_all()
