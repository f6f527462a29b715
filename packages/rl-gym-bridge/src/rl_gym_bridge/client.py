"""Rollouts over HTTP: one POST per attempt to an agent of Gym, many at a time."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from .answers.parsing import parse_answer
from .attempts import Progress, encoded, http_error, last_error, may_be_repeated
from .ending_tasks import end_tasks
from .failures import GymConfigError, GymError, GymStopped, GymTimeout, GymUnavailable
from .requests import RolloutRequest
from .retry import RetryPolicy, retry_after_s
from .suggestions import did_you_mean
from .transport.admission import Admission
from .transport.base import Transport
from .transport.descriptors import affordable_connections
from .transport.failure_log import FailureLog

if TYPE_CHECKING:
    import asyncio

#: Rollouts that may wait for their next attempt without keeping others from being taken, at most.
PAUSING = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent answered.

    Attributes:
        value: the JSON object.
        attempts: how often it was asked, the successful time included.
        seconds: from the first attempt's admission to the answer, pauses included.
    """

    value: dict[str, Any]
    attempts: int
    seconds: float


class GymClient:
    """Runs rollouts at the agents of one Gym, on one event loop.

    An attempt is repeated only where no execution can be under way: the server was never reached, refused, or
    said that the execution ended with an error; see :class:`~rl_gym_bridge.retry.RetryPolicy`. A connection
    that broke and a deadline that passed are not repeated, because Gym may still be working on the rollout;
    whoever dispatches rollouts may do so again under another id.

    Args:
        agents: base URL, ``http://host:port``, of each agent by name.
        transport: the HTTP library; see :func:`~rl_gym_bridge.transport.choice.choose_transport`.
        retry: bounds on the attempts of a rollout.
        max_concurrency: attempts under way at the same time; fewer if this process may open fewer files.
        rollout_timeout_s: bound on one attempt, from its connection to the last byte of its answer.
        admission_timeout_s: how long a rollout may wait for its first attempt while ``max_concurrency``
            others are under way. It bounds a queue that does not move, not one that is long.
        clock: seconds that only grow.
        sleep: waits that many seconds; ``None`` is ``asyncio.sleep``.
        rng: of the pauses' random part.

    Raises:
        GymConfigError: an address is no HTTP URL, or there is no room for a single connection.
    """

    def __init__(
        self,
        agents: Mapping[str, str],
        *,
        transport: Transport,
        retry: RetryPolicy | None = None,
        max_concurrency: int = 1024,
        rollout_timeout_s: float = 3600.0,
        admission_timeout_s: float = 86_400.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._urls = {name: _run_url(name, url) for name, url in agents.items()}
        self._transport = transport
        self._retry = retry or RetryPolicy()
        self._max_concurrency = affordable_connections(max_concurrency)
        self._rollout_timeout_s = rollout_timeout_s
        self._admission_timeout_s = admission_timeout_s
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._admission = Admission(self._max_concurrency)
        self._log = FailureLog(clock=clock)
        self._closed = False

    @property
    def max_concurrency(self) -> int:
        """Attempts under way at the same time, at most."""
        return self._max_concurrency

    async def __aenter__(self) -> GymClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection and repeat nothing any more. May be called again."""
        self._closed = True
        await self._transport.aclose()

    async def run(self, agent: str, body: Mapping[str, Any], *, rollout_id: str | None = None) -> Answer:
        """Run one rollout at ``agent`` and return its answer.

        Args:
            agent: name of the agent.
            body: the JSON object that it gets.
            rollout_id: sent with every attempt as ``Idempotency-Key``; ``None`` makes one up.

        Raises:
            GymConfigError: no such agent.
            GymTimeout: it was not admitted in time, with 0 attempts; or an attempt took too long.
            GymError: the kind of the last failure, with component, address, attempts and elapsed seconds; if
                there was more than one attempt, its ``__cause__`` is the first failure.
        """
        return await self._run(agent, body, rollout_id, Progress())

    async def _run(
        self, agent: str, body: Mapping[str, Any], rollout_id: str | None, progress: Progress
    ) -> Answer:
        url = self._url_of(agent)
        headers = {"Idempotency-Key": quote(rollout_id or uuid.uuid4().hex, safe="/:@~+=,;")}
        payload: bytes | None = None
        first: GymError | None = None
        failure: GymError | None = None
        while True:
            asked_s = 0.0
            if not await self._admitted(progress):
                raise last_error(failure or self._not_admitted(agent, url), first)
            try:
                progress.begin(self._clock())
                if self._closed:
                    raise GymUnavailable("the client is closed")
                payload = payload or encoded(body)
                answer = await self._transport.post(
                    url, payload, timeout_s=self._rollout_timeout_s, headers=headers
                )
                if 200 <= answer.status < 300:
                    return Answer(
                        parse_answer(answer.body), progress.attempts, progress.elapsed_s(self._clock())
                    )
                asked_s = retry_after_s(answer.retry_after, now=time.time())
                raise http_error(answer)
            except GymError as error:
                failure = error
            finally:
                self._admission.leave()
            attempt, elapsed = progress.attempts, progress.elapsed_s(self._clock())
            failure = failure.with_details(component=agent, address=url, attempts=attempt, elapsed_s=elapsed)
            pause = self._retry.pause_s(attempt, self._rng, asked_s=asked_s)
            again = (
                not self._closed
                and may_be_repeated(failure)
                and attempt < self._retry.infra_attempts
                and elapsed + pause <= self._retry.elapsed_s
            )
            self._log.tell(url, f"{failure}{f'; next attempt in {pause:.1f} s' if again else '; given up'}")
            if not again:
                raise last_error(failure, first)
            first = first or failure
            await self._pause(pause)

    async def _admitted(self, progress: Progress) -> bool:
        """Wait for a place; whether there was one before the time for another attempt was over."""
        within_s = self._admission_timeout_s
        if progress.attempts:
            within_s = max(0.0, self._retry.elapsed_s - progress.elapsed_s(self._clock()))
        try:
            await self._admission.enter(within_s)
        except TimeoutError:
            return False
        if progress.attempts and progress.elapsed_s(self._clock()) > self._retry.elapsed_s:
            self._admission.leave()
            return False
        return True

    def _not_admitted(self, agent: str, url: str) -> GymTimeout:
        return GymTimeout(
            f"it was not admitted within {self._admission_timeout_s:g} s: {self._max_concurrency} others are "
            "under way",
            component=agent,
            address=url,
            attempts=0,
            elapsed_s=self._admission_timeout_s,
            remedy="see why they do not end",
        )

    async def stream(
        self, requests: Iterable[RolloutRequest], *, stop: asyncio.Event | None = None
    ) -> AsyncGenerator[tuple[RolloutRequest, Answer | GymError], None]:
        """Run all ``requests`` and hand each over with its answer, or its error, as soon as it has one.

        One failure touches no other rollout. At most ``max_concurrency`` requests, and as many or 1,024 more
        for those that pause, are taken and not yet handed over: a slow reader slows the rollouts down. A
        reader that stops early closes the iterator (``contextlib.aclosing``), which cancels what runs and
        waits until its connections are closed.

        Args:
            requests: what to run; read as needed.
            stop: when it is set, what runs is cancelled and nothing more begins. All are still handed over:
                what had its answer with it, the others with a :class:`GymStopped` that says their attempts,
                0 for those that had not begun, and seconds.
        """
        import asyncio

        waiting = iter(requests)
        finished: asyncio.Queue[asyncio.Task[Answer | GymError]] = asyncio.Queue()
        # The finished ones that were not handed over yet included.
        taken: dict[asyncio.Task[Answer | GymError], tuple[RolloutRequest, Progress]] = {}

        def take_next() -> bool:
            if stop is not None and stop.is_set():
                return False
            for request in waiting:
                progress = Progress()
                task = asyncio.ensure_future(self._outcome(request, progress))
                task.add_done_callback(finished.put_nowait)
                taken[task] = request, progress
                return True
            return False

        async def cancel_when_stopped(event: asyncio.Event) -> None:
            await event.wait()
            await end_tasks(taken)

        stopping = [] if stop is None else [asyncio.ensure_future(cancel_when_stopped(stop))]
        try:
            most = self._max_concurrency + min(self._max_concurrency, PAUSING)
            while len(taken) < most and take_next():
                pass
            while taken:
                task = await finished.get()
                request, progress = taken.pop(task)
                take_next()
                yield request, self._stopped(request, progress) if task.cancelled() else task.result()
            for request in waiting:
                yield request, self._stopped(request, Progress())
        finally:
            await end_tasks((*taken, *stopping))

    async def _outcome(self, request: RolloutRequest, progress: Progress) -> Answer | GymError:
        try:
            return await self._run(request.agent, request.body, request.rollout_id, progress)
        except GymError as error:
            return error
        except Exception as error:
            # Loud (DATA), but this rollout's alone.
            unforeseen = GymError(f"{type(error).__name__}: {error}", component=request.agent)
            unforeseen.__cause__ = error
            return unforeseen

    def _stopped(self, request: RolloutRequest, progress: Progress) -> GymStopped:
        return GymStopped(
            "it was ended before it had an answer",
            component=request.agent,
            address=self._urls.get(request.agent, ""),
            attempts=progress.attempts,
            elapsed_s=progress.elapsed_s(self._clock()),
        )

    async def _pause(self, seconds: float) -> None:
        import asyncio

        await (self._sleep or asyncio.sleep)(seconds)

    def _url_of(self, agent: str) -> str:
        url = self._urls.get(agent)
        if url is None:
            raise GymConfigError(
                f"Gym runs no agent {agent!r}",
                component=agent,
                remedy=did_you_mean(agent, self._urls) or f"known: {', '.join(sorted(self._urls)) or 'none'}",
            )
        return url


def _run_url(agent: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise GymConfigError(
            "not an address of HTTP", component=agent, address=url, remedy="it looks like http://host:port"
        )
    return f"{url.rstrip('/')}/run"
