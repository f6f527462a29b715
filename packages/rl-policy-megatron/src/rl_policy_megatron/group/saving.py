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
        """Whether it is known to have ended, well or not; asking takes a tenth of a second at most."""
        return self._look()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the checkpoint is complete and on disk.

        Args:
            timeout_s: by default the group's ``call_timeout_s``.

        Raises:
            CheckpointError: it could not be saved, or the group ended before it was; or it is not complete
                in time, and then goes on and can be waited for again.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        if not self._ended_within(limit):
            raise CheckpointError(
                f"saving the policy to {self.directory} takes longer than {limit:g} s; it goes on: wait "
                "longer, or save to a faster disk"
            )
        self._tell()

    def settle(self, timeout_s: float) -> None:
        """Wait for the last time, before the ranks are ended; silent about what :meth:`wait` has told.

        Raises:
            CheckpointError: it could not be saved, or was not complete in time.
        """
        if self._told:
            return
        if not self._ended_within(timeout_s):
            raise CheckpointError(
                f"the policy was not saved to {self.directory}: the save was not complete {timeout_s:g} s "
                "after shutdown, and what it has written does not load; wait() for a save before shutdown, "
                "or raise shutdown_timeout_s"
            )
        self._tell()

    def _tell(self) -> None:
        self._told = True
        if self._failure is not None:
            raise CheckpointError(self._failure)

    def _ended_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._look():
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(_LOOK_EVERY_S, max(deadline - time.monotonic(), 0.0)))
        return True

    def _look(self) -> bool:
        """Whether it has ended."""
        with self._lock:
            if self._ended:
                return True
            try:
                if self._asked is None:
                    self._asked = self._ranks.ask("saved", self._number)
                found = self._ranks.look("saved", self._asked, _LOOK_EVERY_S)
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
