"""Requests to replicas and back: split, sent, and sent again where the replica was at fault."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..failures import (
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    NoReplicaError,
    StaleWeightsError,
)
from ..protocol import Completion, GenerationRequest
from .member import Member
from .router import Endpoint, Router
from .settings import FleetSettings
from .states import ReplicaEvent, ReplicaState

# The loop's timer may wake a little early.
_EARLY_S = 0.01


@dataclass(slots=True)
class Traffic:
    """What has gone through a dispatcher.

    Attributes:
        requests: answered.
        tokens: sampled for them.
        sent_again: requests of calls that failed and were sent once more.
        failed_calls: calls to replicas that failed by the replica's fault.
        seconds: in which at least one request was in flight.
    """

    requests: int = 0
    tokens: int = 0
    sent_again: int = 0
    failed_calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Job:
    """One call of the fleet's ``generate``."""

    requests: Sequence[GenerationRequest]
    deadline: float
    began: float
    answers: list[Completion | None] = field(default_factory=list)
    first_cause: InfraError | None = None


@dataclass(slots=True)
class _Lease:
    """Requests that are outstanding at an endpoint."""

    endpoint: Endpoint
    count: int

    def release(self) -> None:
        """They are not any more; idempotent."""
        self.endpoint.outstanding -= self.count
        self.count = 0


class Dispatcher:
    """Sends requests over the router's replicas. Belongs to one event loop.

    Args:
        members: by name.
        router: chooses among them.
        settings: deadlines and budgets.
        version: of the fleet's weights, now.
        poke: called when a replica failed, so that it is probed soon.
    """

    def __init__(
        self,
        members: dict[str, Member],
        router: Router,
        settings: FleetSettings,
        version: Callable[[], int],
        poke: Callable[[], None],
    ) -> None:
        self._members = members
        self._router = router
        self._settings = settings
        self._version = version
        self._poke = poke
        self._active = 0
        self._active_since = 0.0
        self._traffic = Traffic()

    @property
    def active(self) -> int:
        """Calls of :meth:`generate` that have not returned."""
        return self._active

    @property
    def traffic(self) -> Traffic:
        """What has gone through so far; what is in flight counts by its time only."""
        running = asyncio.get_running_loop().time() - self._active_since if self._active else 0.0
        done = self._traffic
        return Traffic(done.requests, done.tokens, done.sent_again, done.failed_calls, done.seconds + running)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests.

        Raises:
            NoReplicaError: nobody could serve in time, or the budget of failures is used up.
            DeadlineError: not all was answered within ``request_timeout_s``.
            GenerationError: a request is at fault; nothing of this call is sent again.
        """
        if not requests:
            return []
        now = asyncio.get_running_loop().time()
        job = _Job(requests, now + self._settings.request_timeout_s, now, [None] * len(requests))
        if self._active == 0:
            self._active_since = now
        self._active += 1
        try:
            await self._serve(job, range(len(requests)), failures=0)
        finally:
            self._active -= 1
            if self._active == 0:
                self._traffic.seconds += asyncio.get_running_loop().time() - self._active_since
        answers = [answer for answer in job.answers if answer is not None]
        assert len(answers) == len(requests)
        return answers

    async def _serve(self, job: _Job, indexes: Sequence[int], failures: int) -> None:
        shares = await self._shares(job, len(indexes))
        leases = [_Lease(self._router.endpoint(name), share) for name, share in shares.items()]
        bounds = [0, *itertools.accumulate(shares.values())]
        # Neighbours often share a prompt, so they stay together.
        parts = [indexes[first:last] for first, last in itertools.pairwise(bounds)]
        try:
            async with asyncio.TaskGroup() as group:
                for lease, part in zip(leases, parts, strict=True):
                    group.create_task(self._send(job, lease, part, failures))
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise first from first.__cause__
        finally:
            # A task that is cancelled before its first step cannot do it itself.
            for lease in leases:
                lease.release()

    async def _shares(self, job: _Job, count: int) -> dict[str, int]:
        left = job.deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise self._late(job)
        try:
            await self._router.wait_serving(min(left, self._settings.replica_wait_s))
            # Nothing runs between this and the look before it, so it finds the same replicas.
            return self._router.split(count)
        except NoReplicaError as error:
            if job.first_cause is None:
                raise
            raise NoReplicaError(f"{error}; first cause: {job.first_cause}") from job.first_cause

    async def _send(self, job: _Job, lease: _Lease, part: Sequence[int], failures: int) -> None:
        member = self._members[lease.endpoint.name]
        if member.state is not ReplicaState.HEALTHY:
            # It was when the work was split, a moment ago.
            lease.release()
            await self._serve(job, part, failures)
            return
        life, incidents, version = member.life, member.machine.incidents, self._version()
        requests = [job.requests[index] for index in part]
        left = job.deadline - asyncio.get_running_loop().time()
        try:
            answers = await member.call(
                member.replica.generate(requests), f"generate of {len(part)} requests", left
            )
            self._check(member, answers, len(part), version)
        except InfraError as error:
            lease.release()
            self._traffic.failed_calls += 1
            job.first_cause = job.first_cause or error
            if member.life == life:
                self._blame(job, member, error, incidents)
            await self._send_again(job, part, failures + 1, error)
            return
        lease.release()
        member.machine.answered()
        self._take(job, member, part, answers)

    async def _send_again(self, job: _Job, part: Sequence[int], failures: int, error: InfraError) -> None:
        if asyncio.get_running_loop().time() >= job.deadline:
            raise self._late(job)
        if failures > self._settings.infra_budget:
            elapsed = asyncio.get_running_loop().time() - job.began
            raise NoReplicaError(
                f"fleet: {len(part)} requests failed on {failures} replicas in turn within {elapsed:.3g} s "
                f"({self._router.describe()}); last: {error}; first cause: {job.first_cause}"
            ) from job.first_cause
        self._traffic.sent_again += len(part)
        await self._serve(job, part, failures)

    def _take(self, job: _Job, member: Member, part: Sequence[int], answers: list[Completion]) -> None:
        tokens = sum(len(answer.token_ids) for answer in answers)
        member.tokens += tokens
        self._traffic.tokens += tokens
        self._traffic.requests += len(part)
        for index, answer in zip(part, answers, strict=True):
            assert job.answers[index] is None, "a request was answered twice"
            job.answers[index] = answer

    def _check(self, member: Member, answers: list[Completion], count: int, version: int) -> None:
        if len(answers) != count:
            raise GenerationError(
                f"replica {member.name}: {len(answers)} answers to {count} requests; its engine is broken"
            )
        for answer in answers:
            oldest = min((*answer.token_versions, answer.weight_version))
            if oldest < version:
                raise StaleWeightsError(
                    f"replica {member.name}: sampled with weights of version {oldest} when the fleet had "
                    f"{version} already; it serves again after a refit"
                )

    def _blame(self, job: _Job, member: Member, error: InfraError, incidents: int) -> None:
        """Take note of a failed call.

        Args:
            job: to which the call belonged.
            member: the replica.
            error: how the call failed.
            incidents: the replica's when the call was sent.
        """
        if isinstance(error, EngineDeadError):
            member.report(ReplicaEvent.DIED, error)
            return
        if isinstance(error, StaleWeightsError):
            member.report(ReplicaEvent.OUTDATED, error)
            return
        # Too much work for the time that the caller gave says nothing of the replica; and calls that were in
        # flight together fail together, of one cause.
        late = asyncio.get_running_loop().time() >= job.deadline - _EARLY_S
        if not late and member.machine.incidents == incidents:
            member.report(ReplicaEvent.FAILED, error)
            if member.machine.failures > self._settings.infra_budget:
                member.report(ReplicaEvent.DIED, error)
        self._poke()

    def _late(self, job: _Job) -> DeadlineError:
        unanswered = sum(answer is None for answer in job.answers)
        cause = f"; first cause: {job.first_cause}" if job.first_cause else ""
        error = DeadlineError(
            f"fleet: {unanswered} of {len(job.requests)} requests have no answer after "
            f"{self._settings.request_timeout_s:g} s ({self._router.describe()}); send fewer at a "
            f"time or raise request_timeout_s{cause}"
        )
        error.__cause__ = job.first_cause
        return error


def _first(errors: BaseExceptionGroup) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
