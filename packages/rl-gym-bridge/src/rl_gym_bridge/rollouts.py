"""The rollouts of a step: requests go to a runner, complete groups come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from .bounded_stream import BoundedStream, StreamEnded, StreamTimeout
from .config import EffortLevel
from .coverage import Coverage
from .dataset import GymRow
from .failures import GymTimeout
from .request_body import GenerationOverrides
from .requests import RolloutRunner
from .rollout_groups import GroupCollector, RolloutGroup
from .rollout_metrics import RolloutMetrics
from .rows import collate_rollout_requests
from .trajectory import RolloutFailure, Trajectory

_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All rollouts of a step.

    Attributes:
        groups: in the order of the rows.
        metrics: see :mod:`rl_gym_bridge.rollout_metrics`.
        coverage: which rows gave how many samples.
    """

    groups: tuple[RolloutGroup, ...]
    metrics: Mapping[str, float]
    coverage: Coverage

    @property
    def outcomes(self) -> list[Trajectory | RolloutFailure]:
        """Every rollout, groups in row order and contiguous."""
        return [outcome for group in self.groups for outcome in group.outcomes]


async def stream_nemo_gym_rollouts(
    runner: RolloutRunner,
    rows: Sequence[GymRow],
    *,
    group_size: int,
    step: int,
    seed: int,
    generation: GenerationOverrides,
    group_prefix: str = "train",
    effort_levels: Sequence[EffortLevel] = (),
    allowed_media_hosts: Collection[str] = (),
    first: int = 0,
    timeout_s: float = 7200.0,
    stall_timeout_s: float | None = None,
) -> AsyncGenerator[RolloutGroup, None]:
    """``group_size`` rollouts of each row; each group is handed over when its last rollout has ended.

    A group is complete even where rollouts of it failed: those are failure records in their places. Rewards
    are the runner's: it takes the penalties and the prices of effort levels that it is configured with.
    Leaving the stream early (``contextlib.aclosing``) closes the runner's.

    Args:
        runner: what runs the requests.
        rows: the tasks; one may appear several times.
        group_size: rollouts per row, ≥ 1.
        step: of the run; with ``group_prefix`` it makes the ids.
        seed: of the run.
        generation: how the run samples.
        group_prefix: first part of the ids; give training and evaluation different ones.
        effort_levels: by which rows ask for more or less thinking; give the runner's configuration the same.
        allowed_media_hosts: hosts that media of the rows may come from.
        first: how many rows of this step were played before these; their ids and seeds are not used again.
        timeout_s: for all of it.
        stall_timeout_s: longest wait for a next result, ``None`` for no bound but ``timeout_s``.

    Raises:
        DatasetError: a row cannot be sent; nothing has been then.
        RolloutCountError: results are missing, double, unknown or mixed up.
        GymTimeout: a deadline passed; it names what is missing.
        GymError: the runner's own failures.
    """
    groups = collate_rollout_requests(
        rows,
        generation=generation,
        group_size=group_size,
        step=step,
        seed=seed,
        group_prefix=group_prefix,
        effort_levels=effort_levels,
        allowed_media_hosts=allowed_media_hosts,
        first=first,
    )
    collector = GroupCollector(rows, groups)
    requests = [request for group in groups for request in group]
    if not requests:
        return
    clock = _Clock(timeout_s, stall_timeout_s)
    stream = BoundedStream(runner.run_rollouts(requests), close_s=_CLOSE_S)
    try:
        while True:
            try:
                result = await stream.next(_CLOSE_S if collector.complete else clock.wait_s())
            except StreamEnded:
                break
            except StreamTimeout:
                if collector.complete:
                    break
                raise clock.passed(collector) from None
            group = collector.add(result)
            if group is not None:
                yield group
            clock.restart()
        collector.check_complete()
    finally:
        await stream.close()


async def collect_rollouts(groups: AsyncGenerator[RolloutGroup, None]) -> RolloutBatch:
    """Everything that a stream of groups gives, in the order of its rows."""
    collected: list[RolloutGroup] = []
    async with aclosing(groups) as stream:
        async for group in stream:
            collected.append(group)
    collected.sort(key=lambda group: group.position)
    results = [result for group in collected for result in group.results]
    coverage = Coverage()
    coverage.expect(result.request for result in results)
    for result in results:
        coverage.add(result)
    return RolloutBatch(
        tuple(collected), {**RolloutMetrics.of(results).summary(), **coverage.summary()}, coverage
    )


def run_nemo_gym_rollout_sync(
    runner: RolloutRunner,
    rows: Sequence[GymRow],
    *,
    group_size: int,
    step: int,
    seed: int,
    generation: GenerationOverrides,
    group_prefix: str = "train",
    effort_levels: Sequence[EffortLevel] = (),
    allowed_media_hosts: Collection[str] = (),
    first: int = 0,
    timeout_s: float = 7200.0,
    stall_timeout_s: float | None = None,
) -> RolloutBatch:
    """Every rollout of a step, waited for; see :func:`stream_nemo_gym_rollouts` for settings and errors.

    Raises:
        RuntimeError: called where an event loop runs; await :func:`collect_rollouts` of the stream there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError(
            "an event loop runs in this thread; await collect_rollouts(stream_nemo_gym_rollouts(…)) instead"
        )
    return asyncio.run(
        collect_rollouts(
            stream_nemo_gym_rollouts(
                runner,
                rows,
                group_size=group_size,
                step=step,
                seed=seed,
                generation=generation,
                group_prefix=group_prefix,
                effort_levels=effort_levels,
                allowed_media_hosts=allowed_media_hosts,
                first=first,
                timeout_s=timeout_s,
                stall_timeout_s=stall_timeout_s,
            )
        )
    )


class _Clock:
    """How long to wait for a next result: until the end of everything, or of the patience for one."""

    def __init__(self, timeout_s: float, stall_timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._stall_s = stall_timeout_s
        self._started = self._last = time.monotonic()

    def restart(self) -> None:
        """A result has come, and its group, if it was complete, is in the reader's hands."""
        self._last = time.monotonic()

    def wait_s(self) -> float:
        now = time.monotonic()
        left = self._started + self._timeout_s - now
        return left if self._stall_s is None else min(left, self._last + self._stall_s - now)

    def passed(self, collector: GroupCollector) -> GymTimeout:
        now = time.monotonic()
        stalled = now - self._started < self._timeout_s
        bound = f"no result for {self._stall_s:g} s" if stalled else f"the bound is {self._timeout_s:g} s"
        return GymTimeout(
            f"the rollouts did not end in time ({bound}): {collector.progress()}",
            component="rollout stream",
            elapsed_s=now - self._started,
            remedy="look for an agent or a model server that hangs, or raise the bound",
        )
