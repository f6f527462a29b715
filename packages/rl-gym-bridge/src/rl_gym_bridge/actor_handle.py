"""A Gym behind a Ray actor: calls with deadlines, typed errors, and rollouts as they finish."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from .endings import GRACE_S, LAYER_S
from .failures import GymConfigError, GymError, GymServerDied, GymTimeout, GymUnavailable
from .requests import RolloutRequest, RolloutResult

logger = logging.getLogger(__name__)

COMPONENT = "Gym's actor"
#: Seconds that a call may take which only looks at or sets something.
CALL_TIMEOUT_S = 120.0


class NemoGymHandle:
    """Turns the handle of a :class:`~rl_gym_bridge.actor.NemoGym` actor into a runner of rollouts.

    It may be passed to other actors, as the handle itself may.

    Args:
        actor: the handle.
        stall_timeout_s: seconds that may pass between two results of :meth:`run_rollouts`.
        shutdown_timeout_s: what :meth:`shutdown` waits by default.
    """

    def __init__(
        self, actor: Any, *, stall_timeout_s: float = 2 * 3600.0, shutdown_timeout_s: float = 120.0
    ) -> None:
        self.actor = actor
        self._stall_timeout_s = stall_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._ended = False

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method of the actor and wait for its result.

        Raises:
            GymServerDied: the actor is dead, or dies meanwhile.
            GymTimeout: no answer within ``timeout_s``.
            GymError: what the method raised, in its own class, with its own status.
        """
        import ray

        if self._ended:
            raise GymUnavailable(f"{method} was called after shutdown", component=COMPONENT)
        began = time.monotonic()
        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=timeout_s)
        except Exception as error:
            problem = unwrapped(error, method, time.monotonic() - began)
            if problem is error:
                raise
            raise problem from error

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Install a tokenizer in the actor; its environment needs the package that it comes from."""
        self.call("set_tokenizer", tokenizer)

    def health_check(self) -> Any:
        """Which servers of Gym live."""
        return self.call("health_check")

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        """See :class:`~rl_gym_bridge.requests.RolloutRunner`.

        Closing the iterator early cancels what runs.

        Raises:
            GymServerDied: the actor is dead, or dies meanwhile; noticed within a second.
            GymTimeout: nothing finished for ``stall_timeout_s`` seconds, or what finished did not arrive.
            GymError: what the actor raised, in its own class, with its own status.
        """
        import ray
        from ray.exceptions import RayTaskError

        if self._ended:
            raise GymUnavailable("run_rollouts was called after shutdown", component=COMPONENT)
        began = time.monotonic()
        # Whether the actor's method has ended, so that nothing of it is left to cancel.
        ended = False
        results: Any = None
        try:
            results = self.actor.run_rollouts.remote(list(requests))
            while True:
                try:
                    reference = await _within(
                        self._stall_timeout_s, anext(results), "run_rollouts gave no result", began
                    )
                except StopAsyncIteration:
                    ended = True
                    return
                yield await _within(
                    CALL_TIMEOUT_S, _value(reference), "a result of run_rollouts did not arrive", began
                )
        except Exception as error:
            ended = isinstance(error, RayTaskError)
            problem = unwrapped(error, "run_rollouts", time.monotonic() - began)
            if problem is error:
                raise
            raise problem from error
        finally:
            if not ended and results is not None:
                # Ray may be gone already.
                with contextlib.suppress(Exception):
                    ray.cancel(results)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Ask Gym to end, wait for it, then end the actor in any case; idempotent.

        Args:
            timeout_s: after which the actor kills Gym; by default ``shutdown_timeout_s``. The actor may take
                ``GRACE_S`` seconds more to see that nothing is left.

        Raises:
            KeyboardInterrupt: it came while the actor was ended, which it still was.
            GymTimeout: something of Gym is left, or the actor did not answer.
            GymError: what else went wrong in the actor. One that had died is not an error: it is what was
                wanted.
        """
        if self._ended:
            return
        self._ended = True
        bound = self._shutdown_timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        problems = end_actor(self.actor, bound + GRACE_S + LAYER_S, bound)
        typed = [
            unwrapped(problem, "shutdown", time.monotonic() - began)
            if isinstance(problem, Exception)
            else problem
            for problem in problems
        ]
        left = [problem for problem in typed if not isinstance(problem, GymServerDied)]
        for problem in typed:
            logger.warning("%s did not end properly: %r", COMPONENT, problem)
        for wanted in (_INTERRUPTS, GymError):
            for problem in left:
                if isinstance(problem, wanted):
                    raise problem


#: What somebody wants who is not to be kept waiting by an error.
_INTERRUPTS = (KeyboardInterrupt, SystemExit)


def end_actor(actor: Any, wait_s: float, timeout_s: float | None = None) -> list[BaseException]:
    """Ask the actor to shut down, wait for it, and kill it, whatever happens on the way.

    Args:
        actor: its handle.
        wait_s: how long to wait for it at most.
        timeout_s: after which the actor kills Gym; ``None`` leaves that to its settings.

    Returns:
        What went wrong, in order; an interrupt, too, which therefore cannot leave the actor behind.
    """
    import ray

    problems: list[BaseException] = []
    try:
        ray.get(actor.shutdown.remote(timeout_s), timeout=wait_s)
    except BaseException as error:
        problems.append(error)
    try:
        ray.kill(actor)
    except BaseException as error:
        problems.append(error)
    return problems


def unwrapped(error: Exception, method: str, elapsed_s: float) -> Exception:
    """What ``error``, of Ray, really says: the actor's own exception, its death, or a deadline.

    An exception that Ray has nothing to do with is returned as it is.
    """
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause: object = error.cause
        # What cannot be unpickled in the actor is an error of Ray's that quotes the one of the import.
        if isinstance(cause, (ImportError, RayError)) and method == "set_tokenizer":
            return GymConfigError(
                f"the tokenizer cannot be loaded there: {_first_line(cause)}",
                component=COMPONENT,
                remedy="add the package that it comes from to the extra `gym` of apps/container",
            )
        if isinstance(cause, Exception) and not isinstance(cause, RayError):
            return cause
    if isinstance(error, GetTimeoutError):
        return GymTimeout(f"{method} did not answer", component=COMPONENT, elapsed_s=elapsed_s)
    if isinstance(error, RayActorError):
        return GymServerDied(
            f"it died before or during {method}: {_first_line(error)}",
            component=COMPONENT,
            elapsed_s=elapsed_s,
            remedy="its Gym ends with it; start another",
        )
    if isinstance(error, RayError):
        return GymUnavailable(
            f"{method} was lost: {type(error).__name__}: {_first_line(error)}", component=COMPONENT
        )
    return error


async def _within(seconds: float, step: Awaitable[Any], problem: str, began: float) -> Any:
    """What ``step`` gives. Its own ``TimeoutError``, of the actor, is not taken for a deadline of ours."""
    import asyncio

    task = asyncio.ensure_future(_kept(step))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if done:
        value, error = task.result()
        if error is not None:
            raise error
        return value
    raise GymTimeout(f"{problem} for {seconds:g} s", component=COMPONENT, elapsed_s=time.monotonic() - began)


async def _kept(step: Awaitable[Any]) -> tuple[Any, Exception | None]:
    # The end of an iteration cannot leave a task as an exception.
    try:
        return await step, None
    except Exception as error:
        return None, error


async def _value(reference: Any) -> Any:
    return await reference


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
