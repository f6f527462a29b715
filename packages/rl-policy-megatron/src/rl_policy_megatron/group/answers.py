"""Waiting for the answers of all ranks to one call: a deadline, and no waiting for ranks that may hang."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .blame import Failure, dead, failure_of, first_of
from .processes import ProcessPlace

_LOOK_EVERY_S = 0.5
_LOOK_AFTER_A_FAILURE_S = 0.1


def answers_of(
    call: str,
    references: Sequence[Any],
    places: Sequence[ProcessPlace | None],
    *,
    timeout_s: float,
    grace_s: float,
    limit: str,
) -> list[Any]:
    """What each rank answered, by rank.

    Args:
        call: the method that was called on all ranks.
        references: Ray's, by rank.
        places: where the ranks' processes are, by rank, as far as it is known.
        timeout_s: for all of them.
        grace_s: how much longer to wait for the failure that the first one followed from.
        limit: the setting that ``timeout_s`` comes from.

    Raises:
        RankError: the first real failure; or who did not answer in time.
    """
    import ray

    world = len(references)
    pending: dict[Any, int] = {reference: rank for rank, reference in enumerate(references)}
    answers: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline = time.monotonic() + timeout_s
    look_s = _LOOK_EVERY_S
    while pending and (left := deadline - time.monotonic()) > 0:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(left, look_s))
        for reference in ready:
            rank = pending.pop(reference)
            try:
                answers[rank] = ray.get(reference)
            except Exception as error:
                failures.append(failure_of(rank, call, error))
        if not ready:
            failures += [dead(rank, call) for rank in pending.values() if _died(places[rank])]
        if any(not failure.follows for failure in failures):
            break
        if failures and look_s == _LOOK_EVERY_S:
            # They may hang for ever in a collective with the one that failed.
            look_s, deadline = _LOOK_AFTER_A_FAILURE_S, min(deadline, time.monotonic() + grace_s)
    if failures:
        raise first_of(failures).raised(call, world)
    if pending:
        silent = sorted(pending.values())
        others = f", and neither did rank {', '.join(map(str, silent[1:]))}" if silent[1:] else ""
        text = (
            f"{call} did not answer within {timeout_s:g} s{others}; raise {limit} if the model is large or "
            "the machine busy"
        )
        raise Failure(silent[0], text, None).raised(call, world)
    return [answers[rank] for rank in range(world)]


def _died(place: ProcessPlace | None) -> bool:
    return place is not None and place.died
