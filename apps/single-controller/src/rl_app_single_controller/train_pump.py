"""Carries out what the controller wants of the policy: in one thread, one thing after the other."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from rl_algorithms.controller import (
    Counters,
    Evaluate,
    Evaluated,
    Event,
    GroupsSaved,
    Publish,
    Published,
    Save,
    Saved,
    SaveGroups,
    Snapshot,
    Train,
    Trained,
)
from rl_algorithms.group_files import GroupStore
from rl_algorithms.loops.asynchronous import AsyncTrainer
from rl_algorithms.staleness import PublishedVersions

T = TypeVar("T")


class Weights(Protocol):
    """A policy that counts how often its weights have changed."""

    def weight_version(self) -> int: ...


class TrainPump:
    """Trains, publishes, evaluates and saves. Belongs to one event loop.

    Args:
        trainer: the training half of the run.
        policy: whose weights they are.
        refresh: gives the engine the policy's weights.
        versions: told of every new one.
        groups: where finished groups are written.
        post: takes the event that ends each piece of work, or the exception that did.
    """

    def __init__(
        self,
        *,
        trainer: AsyncTrainer,
        policy: Weights,
        refresh: Callable[[], None],
        versions: PublishedVersions,
        groups: GroupStore,
        post: Callable[[Event | Exception], None],
    ) -> None:
        self._trainer = trainer
        self._policy = policy
        self._refresh = refresh
        self._versions = versions
        self._groups = groups
        self._post = post
        self._work = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._disk = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="groups")
        self._busy = 0

    @property
    def busy(self) -> bool:
        """Whether the policy has something to do."""
        return self._busy > 0

    def carry_out(
        self,
        command: Train | Publish | Evaluate | Save | SaveGroups,
        snapshot: Callable[[], Snapshot],
        counters: Counters,
    ) -> None:
        """Do it, beside the event loop; ``snapshot`` is called before this returns, if it is wanted."""
        match command:
            case Train(version, groups):
                known = replace(counters)

                def train() -> int:
                    self._trainer.train(version, groups, known)
                    return self._policy.weight_version()

                def trained(counter: int) -> Event:
                    self._versions.publish(counter)
                    return Trained(version)

                self._do(self._work, train, trained)
            case Publish(version):
                self._do(self._work, self._refresh, lambda _: Published(version))
            case Evaluate(version):
                self._do(
                    self._work,
                    lambda: self._trainer.evaluate(version),
                    lambda reached: Evaluated(version, reached=reached),
                )
            case Save(version):
                content = snapshot()

                def saved(_: object) -> Event:
                    # The older ones are of no use any more. Behind whatever is being written there.
                    self._disk.submit(self._groups.keep_only, version)
                    return Saved(version)

                self._do(self._work, lambda: self._trainer.save(version, content), saved)
            case SaveGroups(anchor, groups):
                self._do(self._disk, lambda: self._groups.write(anchor, groups), lambda _: GroupsSaved())

    def revive(self) -> None:
        """Give replicas that are back the present weights, if the policy has nothing else to do."""
        if not self.busy:
            self._do(self._work, self._refresh, lambda _: None)

    def close(self) -> None:
        """Start nothing more; what runs is left to end when its policy does."""
        for pool in (self._work, self._disk):
            pool.shutdown(wait=False, cancel_futures=True)

    def _do(
        self,
        pool: concurrent.futures.Executor,
        work: Callable[[], T],
        event: Callable[[T], Event | None],
    ) -> None:
        counts = pool is self._work
        self._busy += counts
        future = asyncio.get_running_loop().run_in_executor(pool, work)

        def done(finished: asyncio.Future[T]) -> None:
            self._busy -= counts
            if finished.cancelled():
                return
            try:
                found = event(finished.result())
            except Exception as error:
                self._post(error)
            except BaseException as error:
                self._post(RuntimeError(repr(error)))
            else:
                if found is not None:
                    self._post(found)

        future.add_done_callback(done)
