"""What is tried again and how long, what errors say, and that one rollout touches no other."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from rl_gym_bridge.client import Answer, GymClient
from rl_gym_bridge.failures import (
    GymAnswerError,
    GymConfigError,
    GymConnectionLost,
    GymError,
    GymHttpError,
    GymStopped,
    GymTimeout,
    GymUnavailable,
    kind_of,
)
from rl_gym_bridge.requests import RolloutRequest
from rl_gym_bridge.retry import RetryPolicy
from rl_gym_bridge.trajectory import FailureKind
from rl_gym_bridge.transport.aiohttp_transport import AiohttpTransport
from rl_gym_bridge.transport.base import HttpAnswer, Transport
from rl_gym_bridge.transport.httpx_transport import HttpxTransport

TRANSPORTS: dict[str, Callable[..., Transport]] = {"httpx": HttpxTransport, "aiohttp": AiohttpTransport}
both = pytest.mark.parametrize("make", TRANSPORTS.values(), ids=TRANSPORTS)
QUICK = RetryPolicy(infra_attempts=4, base_s=0.001, cap_s=0.01)


def requests(count: int, *, agent: str = "agent") -> list[RolloutRequest]:
    return [RolloutRequest(f"r{index}", "g", "row", agent, {"index": index}) for index in range(count)]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until something holds, which a busy machine may take a while for."""
    for _ in range(int(within_s / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it does not hold after {within_s} s")


class Scripted:
    """A transport without a network: every post takes the next step, the last one again and again."""

    def __init__(self, *steps: HttpAnswer | GymError) -> None:
        self.steps = steps
        self.posts: list[tuple[str, bytes, dict[str, str]]] = []

    async def post(self, url: str, body: bytes, *, timeout_s: float, headers: Any = None) -> HttpAnswer:
        step = self.steps[min(len(self.posts), len(self.steps) - 1)]
        self.posts.append((url, body, dict(headers)))
        if isinstance(step, GymError):
            raise step
        return step

    async def get(self, url: str, *, timeout_s: float) -> HttpAnswer:
        raise AssertionError("a rollout is a POST")

    async def aclose(self) -> None:
        pass


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def run_scripted(*steps: HttpAnswer | GymError, policy: RetryPolicy, clock: Clock | None = None) -> Any:
    """The outcome of one rollout, the transport and the clock."""
    transport, clock = Scripted(*steps), clock or Clock()
    client = GymClient(
        {"agent": "http://gym:1"},
        transport=transport,
        retry=policy,
        clock=clock,
        sleep=clock.sleep,
        rng=random.Random(0),
    )
    try:
        outcome: Any = asyncio.run(client.run("agent", {"a": "é"}, rollout_id="g/0 \n1"))
    except GymError as error:
        outcome = error
    return outcome, transport, clock


OK = HttpAnswer(200, b'{"reward": 1.0}')
BUSY = HttpAnswer(429, b"slow down")
NEVER_SENT, LOST, LATE = GymUnavailable("refused"), GymConnectionLost("reset"), GymTimeout("late")


def test_an_answer_counts_its_attempts_and_every_one_carries_the_rollouts_key() -> None:
    outcome, transport, clock = run_scripted(NEVER_SENT, BUSY, HttpAnswer(503, b""), OK, policy=RetryPolicy())
    assert outcome == Answer({"reward": 1.0}, attempts=4, seconds=pytest.approx(sum(clock.pauses)))
    assert (
        transport.posts
        == [("http://gym:1/run", '{"a": "é"}'.encode(), {"Idempotency-Key": "g/0%20%0A1"})] * 4
    )


@pytest.mark.parametrize("status", [425, 429, 500, 502, 503])
def test_an_infra_status_is_tried_as_often_as_the_budget_says(status: int) -> None:
    policy = RetryPolicy(infra_attempts=3)
    outcome, transport, _ = run_scripted(HttpAnswer(status, b"why"), policy=policy)
    assert isinstance(outcome, GymHttpError)
    assert (outcome.status, outcome.body, outcome.attempts, len(transport.posts)) == (status, "why", 3, 3)
    assert kind_of(outcome) is FailureKind.INFRA


@pytest.mark.parametrize("status", [408, 501, 504, 599])
def test_a_status_after_which_work_may_go_on_or_would_end_the_same_is_infra_and_tried_once(
    status: int,
) -> None:
    outcome, transport, _ = run_scripted(HttpAnswer(status, b"why"), OK, policy=RetryPolicy())
    assert isinstance(outcome, GymHttpError)
    assert (outcome.status, len(transport.posts), kind_of(outcome)) == (status, 1, FailureKind.INFRA)


def test_a_500_behind_which_a_request_was_refused_is_the_rows_fault_and_tried_once() -> None:
    """A row that the model or verifier refuses would otherwise cost as many rollouts as attempts."""
    refused = json.dumps("Hit an exception in agent calling an inner server: " + repr(b'{"code": 400}'))
    outcome, transport, _ = run_scripted(HttpAnswer(500, refused.encode()), OK, policy=RetryPolicy())
    assert isinstance(outcome, GymHttpError)
    assert (outcome.status, outcome.inner_status, kind_of(outcome)) == (500, 400, FailureKind.DATA)
    assert len(transport.posts) == 1
    again = pickle.loads(pickle.dumps(outcome))
    assert (again.inner_status, again.kind) == (400, FailureKind.DATA)
    busy = refused.replace("400", "429").encode()
    outcome, transport, _ = run_scripted(HttpAnswer(500, busy), OK, policy=RetryPolicy())
    assert isinstance(outcome, Answer)
    assert len(transport.posts) == 2


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 403, 404, 409, 413, 422])
def test_a_data_status_is_tried_once(status: int) -> None:
    outcome, transport, _ = run_scripted(HttpAnswer(status, b"why"), OK, policy=RetryPolicy())
    assert isinstance(outcome, GymHttpError)
    assert (outcome.status, len(transport.posts), kind_of(outcome)) == (status, 1, FailureKind.DATA)


@pytest.mark.parametrize("failure", [LOST, LATE])
def test_what_may_still_be_executed_is_never_sent_again(failure: GymError) -> None:
    outcome, transport, _ = run_scripted(failure, OK, policy=RetryPolicy())
    assert type(outcome) is type(failure)
    assert len(transport.posts) == 1
    outcome, transport, _ = run_scripted(BUSY, failure, OK, policy=RetryPolicy())
    assert type(outcome) is type(failure)
    assert len(transport.posts) == 2


def test_an_unusable_answer_is_tried_once() -> None:
    outcome, transport, _ = run_scripted(HttpAnswer(200, b"{"), OK, policy=RetryPolicy())
    assert isinstance(outcome, GymAnswerError)
    assert len(transport.posts) == 1


def test_the_last_error_carries_all_details_and_the_first_cause() -> None:
    outcome, _, clock = run_scripted(NEVER_SENT, BUSY, policy=RetryPolicy(infra_attempts=3))
    assert isinstance(outcome, GymHttpError)
    assert (outcome.component, outcome.address, outcome.attempts) == ("agent", "http://gym:1/run", 3)
    assert outcome.elapsed_s == pytest.approx(sum(clock.pauses))
    assert isinstance(outcome.__cause__, GymUnavailable)
    assert outcome.__cause__.problem == "refused"
    assert outcome.__cause__.attempts == 1
    for part in ("agent", "http://gym:1/run", "slow down", "attempt 3", "refused"):
        assert part in str(outcome)


def test_pauses_double_up_to_the_cap_with_up_to_half_of_it_at_random() -> None:
    _, _, clock = run_scripted(BUSY, policy=RetryPolicy(infra_attempts=9, base_s=1, cap_s=16, elapsed_s=1e9))
    longest = [1, 2, 4, 8, 16, 16, 16, 16]
    assert len(clock.pauses) == 8
    assert all(top / 2 <= pause <= top for pause, top in zip(clock.pauses, longest, strict=True))
    assert len({pause / top for pause, top in zip(clock.pauses, longest, strict=True)}) > 1


def test_elapsed_time_bounds_the_attempts_too() -> None:
    outcome, transport, clock = run_scripted(
        BUSY, policy=RetryPolicy(infra_attempts=10**6, base_s=1, cap_s=10, elapsed_s=60)
    )
    assert outcome.elapsed_s <= 60
    assert 60 - outcome.elapsed_s <= 10
    assert len(transport.posts) == outcome.attempts < 20
    assert sum(clock.pauses) <= 60


class Busy(Scripted):
    """A place is taken until it is ``free`` by each body with ``slow``; others are told to come later."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.began: list[float] = []

    async def post(self, url: str, body: bytes, *, timeout_s: float, headers: Any = None) -> HttpAnswer:
        if b"slow" in body:
            await self.free.wait()
            return OK
        self.began.append(time.monotonic())
        return BUSY


def test_no_further_attempt_starts_late_however_long_it_waits_for_its_place() -> None:
    async def main() -> None:
        transport = Busy()
        client = GymClient(
            {"agent": "http://gym:1"},
            transport=transport,
            max_concurrency=1,
            retry=RetryPolicy(base_s=0.05, cap_s=0.05, elapsed_s=0.3),
        )

        async def hurried() -> None:
            began = time.monotonic()
            with pytest.raises(GymHttpError) as caught:
                await client.run("agent", {})
            assert time.monotonic() - began > 0.25
            assert (caught.value.status, caught.value.attempts) == (429, 1)

        hurry = asyncio.ensure_future(hurried())
        slow = [asyncio.ensure_future(client.run("agent", {"slow": 1})) for _ in range(3)]
        # It does not wait for the place either once its time is over: nobody makes it free before.
        await asyncio.wait_for(hurry, 20)
        transport.free.set()
        await asyncio.gather(*slow)
        assert len(transport.began) == 1
        # Its place in the queue holds nobody up.
        with pytest.raises(GymHttpError):
            await client.run("agent", {})

    asyncio.run(main())


def test_the_wait_for_the_first_attempt_has_a_bound_of_its_own() -> None:
    async def main() -> None:
        transport = Busy()
        client = GymClient(
            {"agent": "http://gym:1"}, transport=transport, max_concurrency=1, admission_timeout_s=0.2
        )
        slow = asyncio.ensure_future(client.run("agent", {"slow": 1}))
        await asyncio.sleep(0)
        with pytest.raises(GymTimeout, match=r"not admitted within 0\.2 s: 1 others are under way") as caught:
            await client.run("agent", {"slow": 1})
        assert (caught.value.attempts, caught.value.component) == (0, "agent")
        transport.free.set()
        await slow
        await client.run("agent", {"slow": 1})

    asyncio.run(main())


def test_when_it_is_stopped_what_has_arrived_is_kept_and_the_rest_tells_its_attempts() -> None:
    class Mixed(Scripted):
        async def post(self, url: str, body: bytes, *, timeout_s: float, headers: Any = None) -> HttpAnswer:
            index = json.loads(body)["index"]
            if index < 10:
                return OK
            if index < 15 and (url, index) not in self.posts:
                self.posts.append((url, index))  # type: ignore[arg-type]
                return BUSY
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        stop = asyncio.Event()
        client = GymClient({"agent": "http://gym:1"}, transport=Mixed(), max_concurrency=9, retry=QUICK)
        ends: dict[str, list[Any]] = {}
        same = requests(1)[0]
        many = [*requests(60), same, same]
        async with aclosing(client.stream(many, stop=stop)) as stream:
            async for request, end in stream:
                if not ends:
                    await asyncio.sleep(0.1)
                    stop.set()
                ends.setdefault(request.rollout_id, []).append(end)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(ends) == 60
        assert len(ends["r0"]) == 3
        flat = [ends[f"r{index}"][0] for index in range(60)]
        assert [type(end) for end in flat] == [Answer] * 10 + [GymStopped] * 50
        assert [end.attempts for end in flat[10:15]] == [2] * 5
        assert all(end.elapsed_s > 0.05 for end in flat[10:15])
        assert {end.attempts for end in flat[15:]} == {0, 1}
        assert all((end.elapsed_s > 0.05) == (end.attempts == 1) for end in flat[15:])
        assert {end.kind for end in flat[10:]} == {FailureKind.INFRA}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("7", 7, 7), ("3600", 30, 30), ("soon", 0.5, 1), ("-1", 0.5, 1), ("", 0.5, 1)],
)
def test_a_server_may_ask_for_a_longer_pause_up_to_the_cap(header: str, least: float, most: float) -> None:
    _, _, clock = run_scripted(HttpAnswer(503, b"", header), OK, policy=RetryPolicy())
    assert least <= clock.pauses[0] <= most


def test_a_date_to_retry_after_counts_from_now() -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    _, _, clock = run_scripted(HttpAnswer(503, b"", date), OK, policy=RetryPolicy())
    assert 15 < clock.pauses[0] <= 20


def test_an_unknown_agent_is_named_with_the_one_that_was_meant() -> None:
    client = GymClient({"mcqa_simple_agent": "http://gym:1"}, transport=Scripted(OK))
    with pytest.raises(GymConfigError, match="did you mean 'mcqa_simple_agent'"):
        asyncio.run(client.run("mcqa_simple_agnt", {}))
    with pytest.raises(GymConfigError, match="known: mcqa_simple_agent"):
        asyncio.run(client.run("zzz", {}))


@pytest.mark.parametrize("url", ["gym:1", "ftp://gym:1", "http://", "http://gym:1/?a=b", ""])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(GymConfigError, match="http://host:port"):
        GymClient({"agent": url}, transport=Scripted(OK))


@pytest.mark.parametrize("body", [{"a": float("nan")}, {"a": object()}, {"a": "\ud800"}])
def test_a_body_that_is_no_json_is_never_sent(body: Any) -> None:
    transport = Scripted(OK)
    with pytest.raises(GymError, match="as JSON") as caught:
        asyncio.run(GymClient({"agent": "http://gym:1"}, transport=transport).run("agent", body))
    assert kind_of(caught.value) is FailureKind.DATA
    assert transport.posts == []


def test_a_closed_client_fails_at_once_and_repeats_nothing() -> None:
    async def main() -> None:
        client = GymClient({"agent": "http://gym:1"}, transport=Scripted(OK))
        await client.aclose()
        await client.aclose()
        with pytest.raises(GymUnavailable, match="closed") as caught:
            await asyncio.wait_for(client.run("agent", {}), 0.5)
        assert caught.value.attempts == 1

    asyncio.run(main())


async def run_once(client: GymClient) -> Answer:
    return await client.run("agent", {})


def use_client(
    make: Callable[..., Transport],
    agents: dict[str, str],
    use: Callable[[GymClient], Awaitable[Any]],
    **settings: Any,
) -> Awaitable[Any]:
    async def main() -> Any:
        async with GymClient(agents, transport=make(), **{"retry": QUICK, **settings}) as client:
            return await use(client)

    return main()


@pytest.mark.faults
@both
def test_k1_a_dead_port_is_given_up_in_time_and_named_in_the_log_at_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rl_gym_bridge")
    url = f"http://127.0.0.1:{closed_port()}"
    transport = make()
    started, wall = time.monotonic(), time.time()
    policy = RetryPolicy(infra_attempts=3, base_s=0.25, cap_s=1, elapsed_s=2)
    with pytest.raises(GymUnavailable) as caught:
        asyncio.run(use_client(lambda: transport, {"agent": url}, run_once, retry=policy))
    assert time.monotonic() - started <= 2.5
    assert caught.value.attempts == 3
    (line,) = caplog.records
    assert line.created - wall <= 1
    assert url in line.getMessage()


def test_the_log_gets_one_line_per_address_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="rl_gym_bridge")
    clock = Clock()
    run_scripted(BUSY, policy=RetryPolicy(infra_attempts=50, base_s=1, cap_s=1, elapsed_s=1e9), clock=clock)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == pytest.approx(sum(clock.pauses) / 30 + 1, abs=1)
    assert "more at http://gym:1/run since the last line" in lines[1]


@pytest.mark.faults
@both
def test_k2_an_endless_429_gets_exactly_the_budgeted_calls_and_its_text_is_kept(
    make: Any, loopback: Any, answer: Any
) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer(429, b"slow down", "Retry-After: 0"))

    async def main() -> None:
        async with loopback(respond) as server:
            with pytest.raises(GymHttpError, match="slow down"):
                await use_client(make, {"agent": server.url}, run_once)
            assert len(server.requests) == 4

    asyncio.run(main())


@pytest.mark.faults
@both
def test_k5_one_500_is_one_failure_among_ten(make: Any, loopback: Any, answer: Any) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer(500, b"boom") if request.json["index"] == 3 else answer(200, request.json))

    async def main() -> None:
        async with loopback(respond) as server:

            async def use(client: GymClient) -> None:
                outcomes = {request.rollout_id: end async for request, end in client.stream(requests(10))}
                assert len(outcomes) == 10
                failed = outcomes.pop("r3")
                assert isinstance(failed, GymHttpError)
                assert (failed.status, failed.attempts) == (500, 4)
                assert {end.value["index"] for end in outcomes.values() if isinstance(end, Answer)} == {
                    0, 1, 2, 4, 5, 6, 7, 8, 9,
                }  # fmt: skip

            await use_client(make, {"agent": server.url}, use)

    asyncio.run(main())


@pytest.mark.faults
@both
def test_a_storm_of_500s_gets_exactly_the_budgeted_calls(make: Any, loopback: Any, answer: Any) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer(random.choice([500, 502, 503]), b"down"))

    async def main() -> None:
        async with loopback(respond) as server:

            async def use(client: GymClient) -> list[Any]:
                return [end async for _, end in client.stream(requests(50))]

            ends = await use_client(make, {"agent": server.url}, use, max_concurrency=20)
            assert [type(end) for end in ends] == [GymHttpError] * 50
            assert set(Counter(one.headers["idempotency-key"] for one in server.requests).values()) == {4}
            assert len(server.requests) == 200

    asyncio.run(main())


@pytest.mark.faults
@both
def test_a_thousand_delivered_then_reset_are_executed_once_each(make: Any, loopback: Any) -> None:
    async def respond(request: Any, writer: Any) -> None:
        linger = b"\1\0\0\0\0\0\0\0"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def main() -> None:
        async with loopback(respond) as server:

            async def use(client: GymClient) -> list[Any]:
                return [end async for _, end in client.stream(requests(1000))]

            ends = await use_client(make, {"agent": server.url}, use, max_concurrency=100)
            assert Counter(type(end) for end in ends) == {GymConnectionLost: 1000}
            executed = Counter(one.headers["idempotency-key"] for one in server.requests)
            assert len(executed) == 1000
            assert max(executed.values()) == 1

    asyncio.run(main())


@both
def test_two_thousand_rollouts_never_exceed_the_concurrency_at_the_server(
    make: Any, loopback: Any, answer: Any
) -> None:
    async def respond(request: Any, writer: Any) -> None:
        await asyncio.sleep(0.01)
        writer.write(answer(200, request.json))

    async def main() -> None:
        async with loopback(respond) as server:

            async def use(client: GymClient) -> None:
                tasks_before, most = len(asyncio.all_tasks()), 0
                seen = Counter[str]()
                async for request, end in client.stream(iter(requests(2000))):
                    assert isinstance(end, Answer)
                    assert end.value == request.body
                    seen[request.rollout_id] += 1
                    most = max(most, len(asyncio.all_tasks()) - tasks_before)
                assert len(seen) == sum(seen.values()) == 2000
                # The client's own, and up to three of the server per connection.
                assert most <= 2 * 100 + 3 * 100 + 5

            await use_client(make, {"agent": server.url}, use, max_concurrency=100)
            assert 90 <= server.peak <= 100
            assert server.connections <= 110

    asyncio.run(main())


@pytest.mark.faults
@both
@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
def test_leaving_in_the_middle_cancels_what_runs_and_leaves_no_socket_and_no_task(
    make: Any, loopback: Any, answer: Any, how: str
) -> None:
    async def respond(request: Any, writer: Any) -> None:
        await asyncio.sleep(0 if request.json["index"] < 5 else 60)
        writer.write(answer(200, request.json))

    async def main() -> None:
        async with loopback(respond) as server:

            async def use(client: GymClient) -> None:
                async def read() -> None:
                    if how == "break":
                        async for _ in client.stream(requests(1000)):
                            break
                    else:
                        async with aclosing(client.stream(requests(1000))) as stream:  # type: ignore[type-var]
                            async for _ in stream:
                                if how == "aclose":
                                    break

                reading = asyncio.ensure_future(read())
                await until(lambda: len(server.requests) > 5 or reading.done())
                if how == "cancel":
                    reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                await until(lambda: server.running == 0)
                assert 0 < len(server.requests) <= 60
                names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
                assert [name for name in names if name.startswith("GymClient")] == []
                # The client is whole: its places are free again.
                ends = [end async for _, end in client.stream(requests(5))]
                assert [type(end) for end in ends] == [Answer] * 5

            await use_client(make, {"agent": server.url}, use, max_concurrency=40)
            await until(lambda: server.open == 0)

    asyncio.run(main())


def test_closing_a_stream_waits_until_nothing_of_it_runs() -> None:
    class Endless(Scripted):
        running = 0

        async def post(self, url: str, body: bytes, *, timeout_s: float, headers: Any = None) -> HttpAnswer:
            if b"0" in body:
                return OK
            self.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                self.running -= 1
            raise AssertionError

    async def main() -> None:
        transport = Endless()
        client = GymClient({"agent": "http://gym:1"}, transport=transport)
        async with aclosing(client.stream(requests(9))) as stream:  # type: ignore[type-var]
            await anext(stream)
            await asyncio.sleep(0.01)
            assert transport.running == 8
        assert transport.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_slow_reader_slows_the_rollouts_down_and_the_source_is_read_as_needed() -> None:
    async def main() -> None:
        taken = 0

        def source() -> Any:
            nonlocal taken
            for request in requests(1000):
                taken += 1
                yield request

        client = GymClient({"agent": "http://gym:1"}, transport=Scripted(OK), max_concurrency=10)
        async with aclosing(client.stream(source())) as stream:  # type: ignore[type-var]
            await anext(stream)
            await asyncio.sleep(0.05)
            assert taken == 21

    asyncio.run(main())


def test_an_error_that_nobody_foresaw_is_loud_and_its_rollouts_alone() -> None:
    class Faulty(Scripted):
        async def post(self, url: str, body: bytes, *, timeout_s: float, headers: Any = None) -> HttpAnswer:
            if b"3" in body:
                raise KeyError("unforeseen")
            return OK

    async def main() -> dict[str, Any]:
        client = GymClient({"agent": "http://gym:1"}, transport=Faulty())
        return {request.rollout_id: end async for request, end in client.stream(requests(10))}

    ends = asyncio.run(main())
    failed = ends.pop("r3")
    assert isinstance(failed, GymError)
    assert kind_of(failed) is FailureKind.DATA
    assert isinstance(failed.__cause__, KeyError)
    assert all(isinstance(end, Answer) for end in ends.values())
    assert len(ends) == 9


def test_an_unknown_agent_in_a_stream_is_that_rollouts_failure() -> None:
    async def main() -> list[Any]:
        client = GymClient({"agent": "http://gym:1"}, transport=Scripted(OK))
        mixed = [*requests(2), *requests(1, agent="agnt")]
        return [type(end) async for _, end in client.stream(mixed)]

    assert Counter(asyncio.run(main())) == {Answer: 2, GymConfigError: 1}


def test_a_rollout_that_pauses_leaves_its_place_to_others() -> None:
    async def main() -> None:
        pausing = asyncio.Event()

        async def sleep(seconds: float) -> None:
            pausing.set()
            await asyncio.Event().wait()

        client = GymClient(
            {"agent": "http://gym:1"}, transport=Scripted(BUSY, OK), max_concurrency=1, sleep=sleep
        )
        first = asyncio.ensure_future(client.run("agent", {}))
        await pausing.wait()
        assert (await asyncio.wait_for(client.run("agent", {}), 1)).attempts == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(main())


@both
def test_k9_answers_of_any_shape_of_messages_pass_through_unchanged(
    make: Any, loopback: Any, answer: Any
) -> None:
    shapes: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "é \U0001f600 \x00"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]

    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer(200, request.body))

    async def main() -> None:
        async with loopback(respond) as server:
            body = {"responses_create_params": {"input": shapes}, "big": 2**70, "small": 5e-324, "empty": {}}
            got = await use_client(make, {"agent": server.url}, lambda client: client.run("agent", body))
            assert got.value == body

    asyncio.run(main())
