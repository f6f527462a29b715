"""Waiting for the answers of all ranks to one call: a deadline, and no waiting for ranks that may hang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RankError
from .blame import Failure, dead, failure_of, first_of
from .processes import ProcessPlace

_LOOK_EVERY_S = 0.5
_LOOK_AFTER_A_FAILURE_S = 0.1


@dataclass(slots=True)
class Answers:
    """What came back from one call to all ranks.

    Attributes:
        call: the method.
        world: number of ranks that were asked.
        values: what ranks returned, by rank.
        failures: what others raised or died of, in the order in which it came.
        silent: ranks that did not answer in time.
        timeout_s: how long they had.
        limit: the setting that this comes from.
        collective_timeout_s: how long ranks wait for each other within the call.
    """

    call: str
    world: int
    timeout_s: float
    limit: str
    collective_timeout_s: float
    values: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)

    def results(self) -> list[Any]:
        """By rank.

        Raises:
            RankError: the first real failure; or who did not answer in time.
        """
        if self.failures:
            raise self._in_vain() or first_of(self.failures).raised(self.call, self.world)
        if self.silent:
            silent = sorted(self.silent)
            others = f", and neither did rank {', '.join(map(str, silent[1:]))}" if silent[1:] else ""
            text = (
                f"{self.call} did not answer within {self.timeout_s:g} s{others}; raise {self.limit} if the "
                "model is large or the machine busy"
            )
            raise Failure(silent[0], text, None).raised(self.call, self.world)
        return [self.values[rank] for rank in range(self.world)]

    def _in_vain(self) -> RankError | None:
        """The error if ranks have waited for others in a collective, and nobody tells more than that."""
        told = first_of(self.failures)
        waiting = [failure for failure in self.failures if failure.waited_s is not None]
        heard = {failure.rank for failure in self.failures}
        if not waiting or not told.follows or (told.named >= 0 and told.named not in heard):
            return None
        waited_s = waiting[0].waited_s or self.collective_timeout_s
        setting = "collective_timeout_s=" if waited_s == self.collective_timeout_s else ""
        waiters = _ranks(failure.rank for failure in waiting)
        silent = sorted(self.silent)
        text = (
            f"{_ranks(silent)} of {self.world} did not answer within {setting}{waited_s:g} s while {waiters} "
            f"waited in {self.call}; see whether a process there is stopped, or hangs in a loss function, or "
            "raise collective_timeout_s if it is only slow"
            if silent
            else f"{waiters} of {self.world} waited in {self.call} for longer than {setting}{waited_s:g} s, "
            "and every rank gave up; see whether all have done the same, or raise collective_timeout_s if "
            "one was only slow"
        )
        error = RankError(text, silent[0] if silent else -1, self.call, answered=not silent)
        error.__cause__ = waiting[0].cause
        return error

    @property
    def refused(self) -> bool:
        """Whether each rank raised something, and lives on."""
        return sum(failure.answered for failure in self.failures) == self.world

    def refusal(self, own: set[int]) -> Failure:
        """The failure that all ranks tell of, once each of them refused.

        Args:
            own: the ranks that did not only hear of another's.
        """
        return first_of([failure for failure in self.failures if failure.rank in own] or self.failures)


def answers_of(
    call: str,
    references: Sequence[Any],
    places: Sequence[ProcessPlace | None],
    *,
    timeout_s: float,
    grace_s: float,
    limit: str,
    collective_timeout_s: float,
) -> Answers:
    """What each rank answered.

    Args:
        call: the method that was called on all ranks.
        references: Ray's, by rank.
        places: where the ranks' processes are, by rank, as far as it is known.
        timeout_s: for all of them.
        grace_s: how much longer to wait for the rest after the first failure: for the one that it followed
            from, or for the others to say the same.
        limit: the setting that ``timeout_s`` comes from.
        collective_timeout_s: how long ranks wait for each other within the call.
    """
    import ray

    answers = Answers(call, len(references), timeout_s, limit, collective_timeout_s)
    pending: dict[Any, int] = {reference: rank for rank, reference in enumerate(references)}
    deadline = time.monotonic() + timeout_s
    look_s = _LOOK_EVERY_S
    while pending and (left := deadline - time.monotonic()) > 0:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(left, look_s))
        for reference in ready:
            rank = pending.pop(reference)
            try:
                answers.values[rank] = ray.get(reference)
            except Exception as error:
                answers.failures.append(failure_of(rank, call, error))
        if not ready:
            answers.failures += [dead(rank, call) for rank in pending.values() if _died(places[rank])]
        if any(not (failure.follows or failure.answered) for failure in answers.failures):
            # It is gone, and whatever the others say, this was first.
            break
        if answers.failures and look_s == _LOOK_EVERY_S:
            # They may hang for ever in a collective with the one that failed.
            look_s, deadline = _LOOK_AFTER_A_FAILURE_S, min(deadline, time.monotonic() + grace_s)
    answers.silent = list(pending.values())
    return answers


def drain(references: Iterable[Any], timeout_s: float) -> None:
    """Take answers that nobody waits for any more, because Ray prints those that it finds unread."""
    import ray

    left = list(references)
    # Ray may be gone, and then prints nothing.
    with contextlib.suppress(Exception):
        ready, _ = ray.wait(left, num_returns=len(left), timeout=timeout_s) if left else ([], [])
        for reference in ready:
            with contextlib.suppress(Exception):
                ray.get(reference, timeout=0)


def _ranks(numbers: Iterable[int]) -> str:
    named = [str(number) for number in sorted(numbers)]
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named)}"


def _died(place: ProcessPlace | None) -> bool:
    return place is not None and place.died
