"""A Gym, the client that talks to it, and what makes samples of its answers: one runner of rollouts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .answers.outcomes import OutcomeMaker, failed
from .config import DeferredBaseUrls, NemoGymConfig
from .endings import GRACE_S, end_all
from .failures import GymError, GymUnavailable, kind_of
from .model_servers import await_model_servers
from .process import GymProcess
from .requests import RolloutRequest, RolloutResult
from .supervision.attached import AttachedGym
from .supervision.watch import HealthWatch, because
from .trajectory import FailureKind
from .transport.choice import choose_transport
from .transport.shared_clients import SharedClients

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True, slots=True)
class SessionHealth:
    """A Gym all of whose servers answer.

    Attributes:
        head_url: address of its head server.
        servers: names of all servers.
        agents: names of those that run rollouts.
    """

    head_url: str
    servers: tuple[str, ...]
    agents: tuple[str, ...]


class GymSession:
    """Runs rollouts at a Gym that it starts, or at one that somebody else runs.

    ``with GymSession(config) as session:`` or ``async with``. Every way out ends a Gym that was started here.

    Args:
        config: of Gym and the bridge.
        head_url: head server of a Gym to use instead of starting one; it is not ended.

    Raises:
        GymConfigError: ``head_url`` is no address.
    """

    def __init__(self, config: NemoGymConfig, *, head_url: str | None = None) -> None:
        self._config = config
        self._gym: GymProcess | AttachedGym = (
            GymProcess(config, search_folder=config.search_folder)
            if head_url is None
            else AttachedGym(head_url)
        )
        self._outcomes = OutcomeMaker(config)
        self._watch = HealthWatch(self._gym)
        self._clients = SharedClients(config)
        self._runs: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()
        self._state = "not started"
        self._models_ready = not isinstance(config.base_urls, DeferredBaseUrls)

    @property
    def head_url(self) -> str:
        """Address of the head server, empty while there is none."""
        return self._gym.head_url

    @property
    def agents(self) -> Mapping[str, str]:
        """Address of every agent by its name; empty unless Gym is ready."""
        return self._gym.agents

    def start(self) -> GymSession:
        """Start Gym, or find the one of somebody else, and wait until every server answers.

        Model servers with reserved addresses are not waited for; the first rollout does that.

        Raises:
            GymConfigError: settings or interpreter cannot be used.
            GymStartError: Gym did not become ready in time; nothing of it is left.
            GymError: the other's Gym cannot be used; see :meth:`AttachedGym.start`.
        """
        with self._lock:
            if self._state != "not started":
                raise GymUnavailable(f"it cannot be started: it is {self._state}", component="session")
            self._state = "starting"
        try:
            if isinstance(self._gym, GymProcess):
                self._gym.start()
            else:
                self._gym.start(self._config.start_timeout_s)
        except BaseException:
            self._state = "failed to start"
            raise
        with self._lock:
            if self._state != "starting":
                raise GymUnavailable(f"it was {self._state} while it started", component="session")
            self._state = "running"
        return self

    async def start_async(self) -> GymSession:
        """:meth:`start`, beside what else runs on the event loop."""
        import asyncio

        return await asyncio.to_thread(self.start)

    def set_tokenizer(self, tokenizer: Any | None) -> None:
        """Add ``prompt_str`` and ``generation_str`` to the answers of results, for logs.

        Args:
            tokenizer: has ``decode(list[int]) -> str``; ``None`` leaves answers as they come.

        Raises:
            GymConfigError: it has no ``decode``.
        """
        self._outcomes.set_tokenizer(tokenizer)

    async def health_check(self, timeout_s: float = 10.0) -> SessionHealth:
        """Ask every server.

        Raises:
            GymUnavailable: it was not started, or was shut down.
            GymServerDied: a server ended or does not answer; ``component`` names it.
        """
        import asyncio

        self._check_running()
        await asyncio.to_thread(self._gym.health, timeout_s)
        return SessionHealth(self.head_url, tuple(sorted(self._gym.servers)), tuple(sorted(self.agents)))

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutResult, None]:
        """See :class:`~rl_gym_bridge.requests.RolloutRunner`.

        A rollout that cannot be had is a :class:`~rl_gym_bridge.trajectory.RolloutFailure` that says whose
        fault it is. When a process of Gym is found dead, or the session is shut down, what runs is ended and
        every rollout that has no answer yet is a failure that says so, with its attempts and seconds. Closing
        the iterator early (``contextlib.aclosing``) ends what runs. May run several times at once, on several
        loops.

        Raises:
            GymUnavailable: the session was not started, or was shut down before.
            GymServerDied: Gym was found dead before; ``component`` names the server.
            GymStartError: a model server with a reserved address did not come up in time.
        """
        import asyncio

        self._check_running()
        if self._watch.is_dead() and self._watch.dead is not None:
            raise self._watch.dead
        stop = asyncio.Event()
        async with (
            self._run(stop),
            self._clients.lease(self.agents) as client,
            self._watch.watching(stop),
        ):
            await self._await_models(stop)
            async with contextlib.aclosing(client.stream(requests, stop=stop)) as answers:
                async for request, answer in answers:
                    if isinstance(answer, GymError):
                        yield failed(request, await self._explained(request, answer))
                    else:
                        yield self._outcomes.result(request, answer)

    @contextlib.asynccontextmanager
    async def _run(self, stop: asyncio.Event) -> AsyncGenerator[None, None]:
        """Let :meth:`shutdown` set ``stop`` from any thread while the block runs."""
        import asyncio

        entry = (asyncio.get_running_loop(), stop)
        with self._lock:
            # Here and not before: a shutdown stops exactly the runs that it finds.
            self._check_running()
            self._runs.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._runs.remove(entry)

    async def _await_models(self, stop: asyncio.Event) -> None:
        """Wait for model servers with reserved addresses, or until ``stop`` is set."""
        deferred = self._config.base_urls
        if not isinstance(deferred, DeferredBaseUrls) or self._models_ready:
            return
        import asyncio

        # Several runs may wait at once; each asks for itself, and none waits for another's loop.
        transport = choose_transport("httpx", max_concurrency=len(deferred.urls))
        loaded = asyncio.ensure_future(await_model_servers(deferred, transport))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({loaded, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                loaded.result()
                self._models_ready = True
        finally:
            for task in (loaded, stopped):
                task.cancel()
            await asyncio.gather(loaded, stopped, return_exceptions=True)
            await transport.aclose()

    async def _explained(self, request: RolloutRequest, error: GymError) -> GymError:
        """What to say of a failed rollout: its own error, or what has become of Gym or of the session."""
        if kind_of(error) is not FailureKind.INFRA:
            return error
        # After a shutdown Gym's processes are gone, too, and nobody has to look for the reason.
        if self._state != "running":
            return because(
                GymUnavailable(f"the session was {self._state} meanwhile", component=request.agent), error
            )
        return await self._watch.explained(error)

    def _check_running(self) -> None:
        if self._state != "running":
            raise GymUnavailable(
                f"it is {self._state}", component="session", remedy="start a session, once, before using it"
            )

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End what runs, and Gym if it was started here; idempotent, from any thread, also before the start.

        Args:
            timeout_s: after which Gym is killed, at once with 0; by default ``config.shutdown_timeout_s``.

        Raises:
            GymTimeout: something of Gym is left, or still ends, ``GRACE_S`` seconds after ``timeout_s``.
        """
        with self._lock:
            self._state = "shut down"
            runs = list(self._runs)
        for loop, stop in runs:
            # The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        if isinstance(self._gym, GymProcess):
            self._end(self._gym, timeout_s)

    def _end(self, gym: GymProcess, timeout_s: float | None) -> None:
        bound = self._config.shutdown_timeout_s if timeout_s is None else max(0.0, timeout_s)
        # In a thread, so that the bound holds even for a process that the kernel does not let go.
        for problem in end_all({"gym": partial(gym.shutdown, timeout_s=bound)}, bound + GRACE_S):
            raise problem

    async def shutdown_async(self, timeout_s: float | None = None) -> None:
        """:meth:`shutdown`, beside what else runs on the event loop."""
        import asyncio

        await asyncio.to_thread(self.shutdown, timeout_s)

    def __enter__(self) -> GymSession:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.shutdown()
            return
        with contextlib.suppress(GymError):
            self.shutdown()

    async def __aenter__(self) -> GymSession:
        return await self.start_async()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.shutdown_async()
            return
        with contextlib.suppress(GymError):
            await self.shutdown_async()
