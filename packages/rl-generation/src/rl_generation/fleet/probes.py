"""Is a replica able to work? All are asked at the same time, and one timeout is enough for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import DeadlineError, StaleWeightsError
from .member import Member, abandon

PROGRESS_KEY = "sampled_tokens"
"""Key of :meth:`~rl_generation.fleet.replica.Engine.health` that grows while an engine works."""

# What a second look at the count of a late replica may take, as a share of the probe's timeout.
_SECOND_LOOK = 0.25


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found.

    Attributes:
        error: why the replica is not fine, or ``None``.
        stale: it answered that its weights are old: it lives, and serves nothing.
        progressed: it did not answer in time, and went on with other work meanwhile.
    """

    error: Exception | None = None
    stale: bool = False
    progressed: bool = False

    @property
    def alive(self) -> bool:
        """Whether the replica works."""
        return self.error is None


async def examine(members: Sequence[Member], timeout_s: float) -> dict[Member, Verdict]:
    """Sample one token from every replica, in parallel.

    One that does not answer within ``timeout_s``, or within the engine's own deadline for a probe, is fine if
    it delivered tokens meanwhile, or if its own count of sampled tokens grew: it has other work, which need
    not come from the fleet. One that answers neither is found after ``timeout_s``, however many they are.

    Args:
        members: whom to probe.
        timeout_s: for all of them together.
    """
    if not members:
        return {}
    delivered = {member: member.tokens for member in members}
    probes = {member: asyncio.ensure_future(member.replica.probe()) for member in members}
    counts = {member: asyncio.ensure_future(member.replica.health()) for member in members}
    try:
        await asyncio.wait(probes.values(), timeout=timeout_s)
        late = [member for member, probe in probes.items() if _is_late(probe)]
        before = {member: _count(counts.get(member)) for member in late}
        again = {
            member: asyncio.ensure_future(member.replica.health())
            for member in late
            if before[member] is not None and member.tokens == delivered[member]
        }
        counts.update(again)
        if again:
            await asyncio.wait(again.values(), timeout=timeout_s * _SECOND_LOOK)
        progressed = {
            member
            for member in late
            if member.tokens > delivered[member] or _grew(before[member], _count(again.get(member)))
        }
        return {
            member: Verdict(progressed=True) if member in progressed else _verdict(member, probe, timeout_s)
            for member, probe in probes.items()
        }
    finally:
        for task in (*probes.values(), *counts.values()):
            abandon(task)


def _verdict(member: Member, probe: asyncio.Future[None], timeout_s: float) -> Verdict:
    if not probe.done():
        return Verdict(DeadlineError(f"replica {member.name}: no answer to a probe within {timeout_s:g} s"))
    try:
        probe.result()
    except StaleWeightsError:
        return Verdict(stale=True)
    except asyncio.CancelledError as error:
        problem = DeadlineError(f"replica {member.name}: its probe was cancelled")
        problem.__cause__ = error
        return Verdict(problem)
    except Exception as error:
        return Verdict(error)
    return Verdict()


def _is_late(probe: asyncio.Future[None]) -> bool:
    if not probe.done():
        return True
    return not probe.cancelled() and isinstance(probe.exception(), DeadlineError)


def _count(health: asyncio.Future[dict[str, Any]] | None) -> int | None:
    if health is None or not health.done() or health.cancelled() or health.exception() is not None:
        return None
    count = health.result().get(PROGRESS_KEY)
    return count if isinstance(count, int) else None


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
