"""Carries out ``Start`` and ``Cancel``: rollouts as tasks of the event loop, their ends as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from rl_algorithms.controller import Cancel, RolloutEnded, Start, Try
from rl_algorithms.staleness import PublishedVersions
from rl_gym_bridge.failures import GymConfigError, GymError, kind_of
from rl_gym_bridge.requests import RolloutRequest, RolloutResult, RolloutRunner
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, Trajectory

Requests = Callable[[int, Sequence[Try]], list[RolloutRequest]]
Post = Callable[[RolloutEnded | Exception], None]


class RolloutPump:
    """Plays rows. Belongs to one event loop.

    Args:
        runner: plays rollouts.
        requests: of a row's tries.
        versions: which step the weights of a token belong to.
        post: takes every end of a try, and an exception that says that nothing can be played at all.
    """

    def __init__(
        self, runner: RolloutRunner, requests: Requests, versions: PublishedVersions, post: Post
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._versions = versions
        self._post = post
        self._tasks: dict[tuple[int, Try], asyncio.Task[None]] = {}
        self._left: dict[asyncio.Task[None], int] = {}

    @property
    def running(self) -> int:
        """Tries in flight."""
        return len(self._tasks)

    def start(self, command: Start) -> None:
        """Play these tries together."""
        task = asyncio.get_running_loop().create_task(self._play(command.position, command.tries))
        self._left[task] = len(command.tries)
        for one in command.tries:
            self._tasks[command.position, one] = task
        task.add_done_callback(lambda done: self._forget(done, command))

    def cancel(self, command: Cancel) -> None:
        """Nobody waits for these tries any more; their task is ended with the last of them."""
        for one in command.tries:
            task = self._tasks.pop((command.position, one), None)
            if task is None:
                continue
            self._left[task] -= 1
            if not self._left[task]:
                task.cancel()

    async def close(self) -> None:
        """End all tries."""
        tasks = list(self._left)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, position: int, tries: Sequence[Try]) -> None:
        requests = self._requests(position, tries)
        waiting = {request.rollout_id: (request, one) for request, one in zip(requests, tries, strict=True)}
        why, kind = "", FailureKind.INFRA
        try:
            stream = self._runner.run_rollouts(requests)
            try:
                async for result in stream:
                    found = waiting.pop(result.request.rollout_id, None)
                    if found is not None:
                        self._ended(position, found[1], result)
            finally:
                # After an error of ours it has not ended by itself, and what it started would go on.
                if isinstance(stream, AsyncGenerator):
                    await stream.aclose()
        except GymConfigError as error:
            self._post(error)
            return
        except GymError as error:
            kind, why = kind_of(error), f"{type(error).__name__}: {error}"
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # Not by us: what the runner is made of was cancelled, and no result will come.
                gone = RuntimeError("the runner of rollouts was cancelled from within")
                gone.__cause__ = error
                self._post(gone)
                return
            raise
        except Exception as error:
            self._post(error)
            return
        done = len(requests) - len(waiting)
        why = why or f"the runner of rollouts ended after {done} of {len(requests)} results"
        for request, one in list(waiting.values()):
            failure = RolloutFailure(request.group_id, request.rollout_id, request.agent, kind, why)
            self._ended(position, one, RolloutResult(request, failure))

    def _ended(self, position: int, one: Try, result: RolloutResult) -> None:
        task = self._tasks.pop((position, one), None)
        if task is not None:
            self._left[task] -= 1
        outcome = result.outcome
        if isinstance(outcome, RolloutFailure):
            self._post(RolloutEnded(position, one.index, one.number, outcome, failure=outcome.kind))
            return
        oldest, newest = self._versions.span(_weights(outcome)) or (None, None)
        self._post(RolloutEnded(position, one.index, one.number, outcome, oldest=oldest, newest=newest))

    def _forget(self, task: asyncio.Task[None], command: Start) -> None:
        self._left.pop(task, None)
        for one in command.tries:
            if self._tasks.get((command.position, one)) is task:
                del self._tasks[command.position, one]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._post(error if isinstance(error, Exception) else RuntimeError(str(error)))


def _weights(trajectory: Trajectory) -> tuple[int, ...]:
    forks = (version for fork in trajectory.forks for version in fork.weight_versions)
    return (*trajectory.weight_versions, *forks)
