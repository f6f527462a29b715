"""A Gym behind a Ray actor: calls with deadlines, typed errors, and rollouts as they finish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .failures import GymConfigError, GymError, GymServerDied, GymTimeout, GymUnavailable
from .requests import RolloutRequest, RolloutResult

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
            GymTimeout: nothing finished for ``stall_timeout_s`` seconds.
            GymError: what the actor raised.
        """
        import asyncio

        import ray

        if self._ended:
            raise GymUnavailable("run_rollouts was called after shutdown", component=COMPONENT)
        began = time.monotonic()
        finished = False
        results: Any = None
        try:
            results = self.actor.run_rollouts.remote(list(requests))
            while True:
                try:
                    reference = await asyncio.wait_for(anext(results), self._stall_timeout_s)
                    result = await asyncio.wait_for(_value(reference), CALL_TIMEOUT_S)
                except StopAsyncIteration:
                    finished = True
                    return
                except asyncio.TimeoutError as error:
                    raise GymTimeout(
                        f"run_rollouts gave no result for {self._stall_timeout_s:g} s",
                        component=COMPONENT,
                        elapsed_s=time.monotonic() - began,
                    ) from error
                yield result
        except GymError:
            raise
        except Exception as error:
            finished = True
            problem = unwrapped(error, "run_rollouts", time.monotonic() - began)
            if problem is error:
                raise
            raise problem from error
        finally:
            if not finished and results is not None:
                # Ray may be gone already.
                with contextlib.suppress(Exception):
                    ray.cancel(results)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Ask Gym to end, wait at most ``timeout_s`` seconds, then end the actor in any case; idempotent."""
        if self._ended:
            return
        self._ended = True
        end_actor(self.actor, self._shutdown_timeout_s if timeout_s is None else timeout_s)


def end_actor(actor: Any, timeout_s: float) -> list[BaseException]:
    """Ask the actor to shut down, wait for it, and kill it, whatever happens on the way.

    Returns:
        What went wrong, in order; an interrupt, too, which therefore cannot leave the actor behind.
    """
    import ray

    problems: list[BaseException] = []
    try:
        ray.get(actor.shutdown.remote(), timeout=timeout_s)
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


async def _value(reference: Any) -> Any:
    return await reference


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
