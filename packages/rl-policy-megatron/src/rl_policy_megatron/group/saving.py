"""A save of all ranks that goes on by itself, as the driver sees it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ..errors import CheckpointError, RankError
from .ranks import Ranks

_LOOK_EVERY_S = 0.1


class PendingGroupSave:
    """Made by :meth:`MegatronPolicyGroup.save_async`; may be waited for from any thread.

    The ranks are asked between their other calls: while they are busy with a long one, a save that has ended
    is known only after it.

    Args:
        ranks: that save.
        number: that they know the save by.
        directory: that they write to.
        timeout_s: how long :meth:`wait` waits if it is not told.
    """

    def __init__(self, ranks: Ranks, number: int, directory: Path, timeout_s: float) -> None:
        self.directory = directory
        self._ranks = ranks
        self._number = number
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._asked: list[object] | None = None
        self._ended = False
        self._failure: str | None = None
        self._told = False

    @property
    def done(self) -> bool:
        """Whether it is known to have ended, well or not."""
        try:
            return self._look(0.0)
        except CheckpointError:
            return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the checkpoint is complete and on disk.

        Args:
            timeout_s: by default the group's ``call_timeout_s``.

        Raises:
            CheckpointError: it could not be saved, or the group ended before it was; or it is not complete
                in time, and then goes on and can be waited for again.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while not self._look(max(min(_LOOK_EVERY_S, deadline - time.monotonic()), 0.0)):
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"saving the policy to {self.directory} takes longer than {limit:g} s; it goes on: wait "
                    "longer, or save to a faster disk"
                )
            time.sleep(min(_LOOK_EVERY_S, max(deadline - time.monotonic(), 0.0)))
        self._told = True
        if self._failure is not None:
            raise CheckpointError(self._failure)

    def settle(self, timeout_s: float) -> None:
        """As :meth:`wait`, but silent about what :meth:`wait` has told before."""
        if not self._told:
            self.wait(timeout_s)

    def _look(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        with self._lock:
            if self._ended:
                return True
            try:
                if self._asked is None:
                    self._asked = self._ranks.ask("saved", self._number)
                found = self._ranks.look("saved", self._asked, timeout_s)
            except RankError as error:
                self._ended = True
                self._failure = (
                    f"the policy was not saved to {self.directory} when the group ended, and what is there "
                    f"does not load: {error}"
                )
                return True
            if found is None:
                return False
            self._asked = None
            if not all(outcome.ended for outcome in found):
                return False
            self._ended = True
            failures = sorted(
                (outcome for outcome in found if outcome.failure), key=lambda outcome: outcome.follows
            )
            self._failure = failures[0].failure if failures else None
            return True
