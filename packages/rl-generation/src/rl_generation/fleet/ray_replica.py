"""The driver's side of an engine in a Ray actor: deadlines, typed failures, a new actor after a death."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..failures import DeadlineError, EngineDeadError, UnavailableBackendError
from ..protocol import Completion, GenerationRequest, RefitSpec
from ..refit.contract import Bucket, RefitAck
from .member import abandon
from .processes import ProcessIdentity
from .ray_errors import typed
from .ray_room import no_room_in_time, require_room
from .ray_settings import RaySettings
from .replica import EngineActor, ReplicaFacts
from .threads import in_thread

if TYPE_CHECKING:
    from ..vllm.prompt_scores import PromptScores


class RayReplica:
    """A :class:`~rl_generation.fleet.replica.Replica` whose engine is a Ray actor.

    The actor is made by :meth:`reserve` or :meth:`start`, whichever comes first. Ray never restarts it: the
    fleet does, because the new one has old weights.

    Args:
        name: of the replica.
        actor_class: of the engine; all its methods are coroutines.
        arguments: of its constructor.
        settings: resources and deadlines.
    """

    def __init__(
        self,
        name: str,
        actor_class: type[EngineActor],
        arguments: Sequence[Any] = (),
        settings: RaySettings | None = None,
    ) -> None:
        self._name = name
        self._class = actor_class
        self._arguments = tuple(arguments)
        self._settings = settings or RaySettings()
        self._actor: Any = None
        self._process: tuple[str, ProcessIdentity] | None = None
        self._port = 0
        self._reserved = False
        self._died = False

    @property
    def name(self) -> str:
        """See :class:`~rl_generation.fleet.replica.Replica`."""
        return self._name

    async def reserve(self) -> str | None:
        """See :class:`~rl_generation.fleet.replica.Replica`."""
        await self._require_actor()
        url: str | None = await self._call("reserve", self._settings.control_timeout_s, self._port)
        self._reserved = True
        self._port = (urlsplit(url).port or 0) if url else 0
        return url

    async def start(self, *, stale: bool = False) -> ReplicaFacts:
        """See :class:`~rl_generation.fleet.replica.Replica`.

        Raises:
            UnschedulableError: no node has room for the actor, or none had in time.
            DeadlineError, EngineDeadError, GenerationError: it did not start.
        """
        await self._require_actor()
        if self._port and not self._reserved:
            await self.reserve()
        return await self._call("start", self._settings.start_timeout_s, stale=stale)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`~rl_generation.fleet.replica.Replica`."""
        return await self._call("generate", self._settings.generate_timeout_s, list(requests))

    async def score_all(self, sequences: Sequence[Sequence[int]], top: int) -> list[PromptScores]:
        """See :meth:`~rl_generation.vllm.engine.VllmEngine.score_all_async`, for engines that have it."""
        return await self._call("score_all", self._settings.generate_timeout_s, list(sequences), top)

    async def probe(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Replica`."""
        await self._call("probe", self._settings.control_timeout_s)

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._call("begin_refit", self._settings.refit_timeout_s, spec, version)

    async def load_bucket(self, bucket: Bucket) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._call("load_bucket", bucket.window * self._settings.refit_timeout_s, bucket)

    async def finish_refit(self) -> RefitAck:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        return await self._call("finish_refit", self._settings.refit_timeout_s)

    async def abort_refit(self) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        await self._call("abort_refit", self._settings.refit_timeout_s)

    async def pause(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._call("pause", self._settings.refit_timeout_s)

    async def resume(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._call("resume", self._settings.refit_timeout_s)

    async def sleep(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._call("sleep", self._settings.refit_timeout_s)

    async def wake(self) -> None:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        await self._call("wake", self._settings.refit_timeout_s)

    async def health(self) -> dict[str, Any]:
        """See :class:`~rl_generation.fleet.replica.Engine`."""
        return await self._call("health", self._settings.control_timeout_s)

    async def kill(self) -> None:
        """End the actor's process at once; idempotent, never raises.

        If it runs on this machine, it is gone when this returns.
        """
        actor, self._actor = self._actor, None
        process, self._process = self._process, None
        self._reserved = self._died = False
        if actor is not None:
            with contextlib.suppress(Exception):
                await in_thread(lambda: _kill(actor), f"replica {self._name}: kill", self._kill_s)
        if process is not None and process[0] == _machine():
            identity = process[1]
            # A stopped process does not hear Ray.
            if not await identity.gone_within(self._kill_s / 2):
                identity.kill()
                await identity.gone_within(self._kill_s / 2)

    async def shutdown(self, timeout_s: float) -> None:
        """Ask the engine to release everything, then end it; idempotent, returns within ``timeout_s``."""
        if self._actor is not None and not self._died:
            asked_s = 0.7 * timeout_s
            with contextlib.suppress(Exception):
                await self._call("shutdown", asked_s, asked_s)
        await self.kill()

    @property
    def _kill_s(self) -> float:
        return self._settings.kill_timeout_s

    @property
    def _class_name(self) -> str:
        return f"{self._class.__module__}.{self._class.__qualname__}"

    async def _require_actor(self) -> None:
        if self._actor is not None and not self._died:
            return
        await self.kill()
        settings, began = self._settings, asyncio.get_running_loop().time()
        self._actor = await in_thread(
            self._make, f"replica {self._name}: making its actor", settings.schedule_timeout_s
        )
        left = settings.schedule_timeout_s - (asyncio.get_running_loop().time() - began)
        try:
            where: tuple[str, int, int] = await self._answer(
                self._actor.__ray_call__.remote(_where), "starting its process", max(left, 0.1)
            )
        except DeadlineError as error:
            await self.kill()
            raise await in_thread(
                lambda: no_room_in_time(
                    self._name, self._class_name, settings.wanted, settings.schedule_timeout_s
                ),
                f"replica {self._name}: asking Ray for its nodes",
                settings.control_timeout_s,
            ) from error
        machine, pid, born = where
        self._process = (machine, ProcessIdentity(pid, born))

    def _make(self) -> Any:
        """Make the actor's handle; blocks."""
        import ray

        from rl_actor_envs.runtime import make_actor_runtime_env

        if not ray.is_initialized():
            raise UnavailableBackendError(
                f"replica {self._name}: this process has not joined a Ray cluster; call ray.init first"
            )
        settings = self._settings
        if settings.scheduling_strategy is None and not settings.nodes_may_join:
            require_room(self._name, self._class_name, settings.wanted)
        runtime_env = make_actor_runtime_env(
            settings.environment or self._class, env_vars=dict(settings.env_vars)
        )
        options: dict[str, Any] = {
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.num_gpus,
            "resources": dict(settings.resources),
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": settings.max_concurrency,
            "runtime_env": dict(runtime_env),
        }
        if settings.scheduling_strategy is not None:
            options["scheduling_strategy"] = settings.scheduling_strategy
        return ray.remote(self._class).options(**options).remote(*self._arguments)

    async def _call(self, method: str, timeout_s: float, *arguments: Any, **named: Any) -> Any:
        if self._actor is None:
            raise EngineDeadError(f"replica {self._name}: {method}: it has no process; start() makes one")
        return await self._answer(getattr(self._actor, method).remote(*arguments, **named), method, timeout_s)

    async def _answer(self, reference: Any, method: str, timeout_s: float) -> Any:
        actor, task = self._actor, asyncio.ensure_future(_wait_for(reference))
        try:
            done, _ = await asyncio.wait((task,), timeout=timeout_s)
            if done:
                return task.result()
        except Exception as error:
            problem = typed(error, self._name, method)
            if isinstance(problem, EngineDeadError) and actor is self._actor:
                self._died = True
            if problem is error:
                raise
            raise problem from problem.__cause__
        finally:
            if not task.done():
                _cancel(reference)
            abandon(task)
        raise DeadlineError(f"replica {self._name}: {method} did not answer within {timeout_s:.3g} s")


def _where(actor: object) -> tuple[str, int, int]:
    """Machine, process and its birth; runs in the actor."""
    identity = ProcessIdentity.of(os.getpid())
    return _machine(), identity.pid, identity.born


def _machine() -> str:
    """Names this machine, or the part of it whose processes have numbers of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Nothing is known about its processes then.
        return f"unknown {os.getpid()}"


async def _wait_for(reference: Any) -> Any:
    return await reference


def _kill(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def _cancel(reference: Any) -> None:
    import ray

    # Nobody waits for the answer, and the actor may be gone.
    with contextlib.suppress(Exception):
        ray.cancel(reference)
