"""One refit of several replicas: announce, load bucket by bucket, compare what they acknowledge."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..failures import DeadlineError, EngineDeadError, GenerationError, RefitError, StaleWeightsError
from ..protocol import RefitSpec
from ..refit.contract import Bucket, RefitAck, WeightSource, manifest_digest
from ..refit.window import LoadingWindow
from .member import Member
from .settings import FleetSettings
from .states import ReplicaEvent, ReplicaState
from .threads import in_thread

logger = logging.getLogger(__name__)


class FleetRefit:
    """Moves one version of the weights to replicas that go through it together.

    A replica that fails drops out and the others go on: it is stale, or dead if it does not answer, has died,
    or cannot be trusted to serve nothing. From the first bucket on, every replica is stale until its own
    acknowledgement has come.

    Args:
        members: the live replicas that take part.
        source: of the weights; used from threads, one call at a time.
        version: of the weights.
        settings: deadlines, and how the bytes travel.

    Attributes:
        refitted: the replicas that completed it.
    """

    def __init__(
        self, members: Sequence[Member], source: WeightSource, version: int, settings: FleetSettings
    ) -> None:
        self._source = source
        self._version = version
        self._settings = settings
        self._taking_part = list(members)
        self._failed: dict[Member, Exception] = {}
        self._lives = {member: member.life for member in members}
        self._stale_before = {member for member in members if member.state is ReplicaState.STALE}
        self._asked: set[Member] = set()
        self._begun: set[Member] = set()
        self._may_believe_in_it: set[Member] = set()
        self._loaded: dict[Member, int] = dict.fromkeys(members, 0)
        self._moving = False
        self._closed = self._source_begun = False
        self._closing = threading.Lock()
        self.refitted: list[Member] = []

    async def run(self) -> None:
        """Refit; afterwards at least one replica serves the new version.

        Raises:
            RefitError: no replica completed it; the first cause is kept.
            GenerationError: the source failed or was silent.
        """
        try:
            spec = await self._from_source("begin", self._begin_source)
            await self._begin(spec)
            async with LoadingWindow() as window:
                while (bucket := await self._next_bucket()) is not None:
                    await window.load(bucket, self._load(bucket))
            await self._finish(spec)
        finally:
            # However it ended; also when the caller gave up.
            await asyncio.shield(self._close())

    def _begin_source(self) -> RefitSpec:
        spec = self._source.begin(self._settings.transport)
        with self._closing:
            late, self._source_begun = self._closed, not self._closed
        if late:
            # Nobody waits for it any more.
            self._source.end()
        return spec

    async def _begin(self, spec: RefitSpec) -> None:
        async def begin(member: Member) -> None:
            # Before its answer: it may have begun when nobody waits for that any more.
            self._asked.add(member)
            await member.replica.begin_refit(spec, self._version)
            self._begun.add(member)

        await self._step("begin_refit", begin)

    async def _next_bucket(self) -> Bucket | None:
        return await self._from_source("next_bucket", self._source.next_bucket)

    async def _load(self, bucket: Bucket) -> None:
        self._mark_moving()
        # It may wait at the engine behind those of its window.
        timeout_s = bucket.window * self._settings.refit_call_timeout_s
        for member in await self._step("load_bucket", lambda m: m.replica.load_bucket(bucket), timeout_s):
            self._loaded[member] += 1

    async def _finish(self, spec: RefitSpec) -> None:
        self._mark_moving()
        digest = manifest_digest(spec)

        async def finish(member: Member) -> None:
            self._may_believe_in_it.add(member)
            try:
                ack = await member.replica.finish_refit()
            except Exception:
                # It says itself that it did not finish.
                self._may_believe_in_it.discard(member)
                raise
            _compare(member, ack, self._version, digest)

        self.refitted = await self._step("finish_refit", finish)
        self._taking_part = []
        for member in self.refitted:
            member.report(ReplicaEvent.REFITTED)

    async def _step(
        self, what: str, work: Callable[[Member], Coroutine[Any, Any, None]], timeout_s: float | None = None
    ) -> list[Member]:
        """One step of every replica that still takes part; those that completed it."""
        members = self._taking_part
        timeout_s = timeout_s or self._settings.refit_call_timeout_s
        outcomes = await asyncio.gather(
            *(member.call(work(member), what, timeout_s) for member in members), return_exceptions=True
        )
        for member, outcome in zip(members, outcomes, strict=True):
            if outcome is None:
                continue
            if not isinstance(outcome, Exception):
                raise outcome
            if member not in self._failed:
                # Otherwise the load of another bucket has found out first.
                self._failed[member] = outcome
                logger.warning("replica %s: dropped out of a refit: %s", member.name, outcome)
        self._taking_part = [member for member in self._taking_part if member not in self._failed]
        if not self._taking_part:
            first = next(iter(self._failed.values()))
            causes = "; ".join(str(error) for error in self._failed.values())
            raise RefitError(
                f"fleet: no replica completed the refit to version {self._version}: {causes}"
            ) from first
        return [member for member in members if member not in self._failed]

    def _mark_moving(self) -> None:
        if not self._moving:
            self._moving = True
            for member in self._taking_part:
                member.report(ReplicaEvent.OUTDATED)

    async def _from_source(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return await in_thread(
                work, f"fleet: {what} of the source of the weights", self._settings.source_timeout_s
            )
        except GenerationError:
            raise
        except Exception as error:
            raise GenerationError(
                f"fleet: {what} of the source of the weights failed: {type(error).__name__}: {error}"
            ) from error

    async def _close(self) -> None:
        """Bring every replica that did not complete it into a state that is known, and end the source."""
        cut_short = RefitError(f"fleet: the refit to version {self._version} was not completed")
        left = {**self._failed, **dict.fromkeys(self._taking_part, cut_short)}
        await asyncio.gather(*(self._settle(m, error) for m, error in left.items()))
        with self._closing:
            self._closed = True
        if not self._source_begun:
            # It is not ours to end: another refit may be what it refused to begin for.
            return
        try:
            await self._from_source("end", self._source.end)
        except GenerationError as error:
            # What the refit itself came to matters more.
            logger.warning("%s", error)

    async def _settle(self, member: Member, error: Exception) -> None:
        if member.life != self._lives[member]:
            # Given up meanwhile; what is there now is another process.
            return
        unanswered = isinstance(error, (EngineDeadError, DeadlineError))
        untouched = self._loaded[member] == 0 and member not in self._stale_before
        if unanswered or member in self._may_believe_in_it or (self.refitted and untouched):
            # Its engine, and so its server, goes on: with the old weights if nothing came, or with the new
            # ones if only their acknowledgement is missing.
            member.report(ReplicaEvent.DIED, error)
            return
        if member in self._asked:
            try:
                await member.call(
                    member.replica.abort_refit(), "abort_refit", self._settings.refit_call_timeout_s
                )
            except Exception as problem:
                logger.warning("replica %s: did not end a refit: %s", member.name, problem)
                member.report(ReplicaEvent.DIED, error)
                return
        if member not in self._begun:
            if not isinstance(error, RefitError):
                member.report(ReplicaEvent.FAILED, error)
            return
        if self._moving:
            stale = StaleWeightsError(f"replica {member.name}: its refit failed: {error}")
            stale.__cause__ = error
            member.report(ReplicaEvent.OUTDATED, error)
            member.give_up(stale)


def _compare(member: Member, ack: RefitAck, version: int, digest: str) -> None:
    if ack.version != version or ack.digest != digest:
        raise RefitError(
            f"replica {member.name}: acknowledged version {ack.version} with manifest {ack.digest[:12]}, and "
            f"version {version} with {digest[:12]} was sent"
        )
