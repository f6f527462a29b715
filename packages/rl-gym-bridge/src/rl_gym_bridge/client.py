"""Rollouts over HTTP: one POST per attempt to an agent of Gym, many at a time."""

from __future__ import annotations

import difflib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from .admission import Admission
from .answers import beginning, parse_answer
from .failure_log import FailureLog
from .failures import GymConfigError, GymError, GymHttpError, GymUnavailable, kind_of
from .requests import RolloutRequest
from .retry import RetryPolicy, retry_after_s
from .trajectory import FailureKind
from .transport.base import HttpAnswer, Transport
from .transport.descriptors import affordable_connections

if TYPE_CHECKING:
    import asyncio

#: Rollouts that may wait for their next attempt without keeping others from being taken, at most.
PAUSING = 1024
#: Characters of an error's body that its message shows, and that the error keeps.
SHOWN_OF_ERROR, KEPT_OF_ERROR = 500, 2000


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

    An attempt is repeated only where no execution can be under way: the server was never reached, or it
    answered with an INFRA status itself. A connection that broke and a deadline that passed are not repeated,
    because Gym may still be working on the rollout; whoever dispatches rollouts may do so again under another
    id.

    Args:
        agents: base URL, ``http://host:port``, of each agent by name.
        transport: the HTTP library; see :func:`~rl_gym_bridge.transport.choice.choose_transport`.
        retry: bounds on the attempts of a rollout.
        max_concurrency: attempts under way at the same time; fewer if this process may open fewer files.
        rollout_timeout_s: bound on one attempt, from its connection to the last byte of its answer.
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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._urls = {name: _run_url(name, url) for name, url in agents.items()}
        self._transport = transport
        self._retry = retry or RetryPolicy()
        self._max_concurrency = affordable_connections(max_concurrency)
        self._rollout_timeout_s = rollout_timeout_s
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
            GymError: the kind of the last failure, with component, address, attempts and elapsed seconds; if
                there was more than one attempt, its ``__cause__`` is the first failure.
        """
        url = self._url_of(agent)
        headers = {"Idempotency-Key": quote(rollout_id or uuid.uuid4().hex, safe="/:@~+=,;")}
        payload: bytes | None = None
        started: float | None = None
        first: GymError | None = None
        attempt = 0
        while True:
            asked_s = 0.0
            async with self._admission:
                if started is None:
                    started = self._clock()
                attempt += 1
                try:
                    if self._closed:
                        raise GymUnavailable("the client is closed")
                    payload = payload or _encoded(body)
                    answer = await self._transport.post(
                        url, payload, timeout_s=self._rollout_timeout_s, headers=headers
                    )
                    if 200 <= answer.status < 300:
                        return Answer(parse_answer(answer.body), attempt, self._clock() - started)
                    asked_s = retry_after_s(answer.retry_after, now=time.time())
                    raise _http_error(answer)
                except GymError as error:
                    failure = error
            elapsed = self._clock() - started
            failure = failure.with_details(component=agent, address=url, attempts=attempt, elapsed_s=elapsed)
            pause = self._retry.pause_s(attempt, self._rng, asked_s=asked_s)
            again = (
                not self._closed
                and _nothing_runs_after(failure)
                and attempt < self._retry.infra_attempts
                and elapsed + pause <= self._retry.elapsed_s
            )
            self._log.tell(url, f"{failure}{f'; next attempt in {pause:.1f} s' if again else '; given up'}")
            if not again:
                raise _last(failure, first)
            first = first or failure
            await self._pause(pause)

    async def stream(
        self, requests: Iterable[RolloutRequest]
    ) -> AsyncIterator[tuple[RolloutRequest, Answer | GymError]]:
        """Run all ``requests`` and hand each over with its answer, or its error, as soon as it has one.

        One failure touches no other rollout. At most ``max_concurrency`` requests, and as many or 1,024 more
        for those that pause, are taken and not yet handed over: a slow reader slows the rollouts down. A
        reader that stops early closes the iterator (``contextlib.aclosing``), which cancels what runs and
        waits until its connections are closed.
        """
        import asyncio

        waiting = iter(requests)
        finished: asyncio.Queue[asyncio.Task[Answer | GymError]] = asyncio.Queue()
        # The finished ones that were not handed over yet included.
        taken: dict[asyncio.Task[Answer | GymError], RolloutRequest] = {}

        def take_next() -> bool:
            for request in waiting:
                task = asyncio.ensure_future(self._outcome(request))
                task.add_done_callback(finished.put_nowait)
                taken[task] = request
                return True
            return False

        try:
            most = self._max_concurrency + min(self._max_concurrency, PAUSING)
            while len(taken) < most and take_next():
                pass
            while taken:
                task = await finished.get()
                request = taken.pop(task)
                take_next()
                yield request, task.result()
        finally:
            for task in taken:
                task.cancel()
            await asyncio.gather(*taken, return_exceptions=True)

    async def _outcome(self, request: RolloutRequest) -> Answer | GymError:
        try:
            return await self.run(request.agent, request.body, rollout_id=request.rollout_id)
        except GymError as error:
            return error
        except Exception as error:
            # Loud (DATA), but this rollout's alone.
            unforeseen = GymError(f"{type(error).__name__}: {error}", component=request.agent)
            unforeseen.__cause__ = error
            return unforeseen

    async def _pause(self, seconds: float) -> None:
        import asyncio

        await (self._sleep or asyncio.sleep)(seconds)

    def _url_of(self, agent: str) -> str:
        url = self._urls.get(agent)
        if url is None:
            close = difflib.get_close_matches(agent, self._urls, n=1)
            known = ", ".join(sorted(self._urls)) or "none"
            raise GymConfigError(
                f"Gym runs no agent {agent!r}",
                component=agent,
                remedy=f"did you mean {close[0]!r}?" if close else f"known: {known}",
            )
        return url


def _run_url(agent: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise GymConfigError(
            "not an address of HTTP", component=agent, address=url, remedy="it looks like http://host:port"
        )
    return f"{url.rstrip('/')}/run"


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(body), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise GymError(f"the request cannot be written as JSON ({error})") from error


def _http_error(answer: HttpAnswer) -> GymHttpError:
    shown = beginning(answer.body, SHOWN_OF_ERROR)
    redirect = " (a redirect, which is not followed)" if 300 <= answer.status < 400 else ""
    return GymHttpError(
        f"answered {answer.status}{redirect}{': ' + shown if shown else ''}",
        status=answer.status,
        body=beginning(answer.body, KEPT_OF_ERROR),
    )


def _nothing_runs_after(failure: GymError) -> bool:
    """Whether Gym can be working on the rollout no more."""
    if isinstance(failure, GymHttpError):
        return kind_of(failure) is FailureKind.INFRA
    return isinstance(failure, GymUnavailable)


def _last(failure: GymError, first: GymError | None) -> GymError:
    """``failure``, with the first one as its cause, and in words where they differ."""
    if first is None:
        return failure
    if first.problem != failure.problem:
        failure = failure.with_details(f"{failure.problem}; at first: {first.problem}")
    failure.__cause__ = first
    return failure
