"""Sessions with doubles of Gym: one that is attached to, and one that the session starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl_gym_bridge.actor import NemoGym
from rl_gym_bridge.config import DeferredBaseUrls, EffortLevel, NemoGymConfig, RewardPenalties
from rl_gym_bridge.failures import (
    GymAnswerError,
    GymConfigError,
    GymHttpError,
    GymServerDied,
    GymStartError,
    GymStateUnknown,
    GymTimeout,
    GymUnavailable,
)
from rl_gym_bridge.model_servers import readiness_urls
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.retry import RetryPolicy
from rl_gym_bridge.session import GymSession
from rl_gym_bridge.supervision.watch import HealthWatch
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, Trajectory

DOUBLES = Path(__file__).parent / "doubles"
ONCE = RetryPolicy(infra_attempts=1)
# Less than any deadline that must not be waited for, and more than a busy machine takes.
SOON_S = 15.0
AGENT = "the_agent"


def request(number: int = 0, *, agent: str = AGENT, effort: str = "", **wanted: Any) -> RolloutRequest:
    body = {"wanted": wanted, **({"says": wanted.pop("says")} if "says" in wanted else {})}
    return RolloutRequest(f"r{number}", "g", "row", agent, body, effort)


async def collected(session: GymSession, *requests: RolloutRequest) -> list[RolloutResult]:
    return [result async for result in session.run_rollouts(requests)]


def run(session: GymSession, *requests: RolloutRequest) -> list[RolloutResult]:
    return asyncio.run(collected(session, *requests))


def failure(result: RolloutResult) -> RolloutFailure:
    assert isinstance(result.outcome, RolloutFailure)
    return result.outcome


@pytest.fixture
def other_gym() -> Iterator[Callable[..., tuple[str, subprocess.Popen[str]]]]:
    """Starts Gyms that a session may be attached to: head server's address and process."""
    made = []

    def start(*arguments: str) -> tuple[str, subprocess.Popen[str]]:
        command = [sys.executable, str(DOUBLES / "gym_http.py"), *arguments]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout is not None
        return made[-1].stdout.readline().strip(), made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture
def head_url(other_gym: Callable[..., tuple[str, Any]]) -> str:
    return other_gym()[0]


def config(**changes: Any) -> NemoGymConfig:
    values = {"retry": ONCE, "start_timeout_s": 5.0, "transport": "httpx", "rollout_timeout_s": 20.0}
    return NemoGymConfig("policy", **{**values, **changes})


def test_it_runs_rollouts_at_a_gym_that_somebody_else_runs(head_url: str) -> None:
    with GymSession(config(), head_url=head_url) as session:
        assert session.head_url == head_url
        assert sorted(session.agents) == [AGENT]
        results = run(session, *(request(number, reward=number) for number in range(20)))
        health = asyncio.run(session.health_check())
    assert (health.head_url, health.servers, health.agents) == (head_url, (AGENT,), (AGENT,))
    assert sorted(result.request.rollout_id for result in results) == sorted(f"r{n}" for n in range(20))
    for result in results:
        outcome = result.outcome
        assert isinstance(outcome, Trajectory)
        assert (outcome.rollout_id, outcome.group_id, outcome.agent) == (
            result.request.rollout_id,
            "g",
            AGENT,
        )
        assert outcome.reward == float(outcome.rollout_id[1:])
        assert (outcome.token_ids, outcome.token_mask) == ((1, 2, 3, 4), (0, 0, 1, 1))
        # The verifier's number is a metric, the echoed row is none.
        assert outcome.metrics["score"] == 0.5
        assert (result.attempts, result.answer is not None) == (1, True)


def test_results_come_as_they_finish(head_url: str) -> None:
    with GymSession(config(), head_url=head_url) as session:
        results = run(session, request(0, hang_s=0.8), request(1), request(2, hang_s=0.4))
    assert [result.request.rollout_id for result in results] == ["r1", "r2", "r0"]


@pytest.mark.parametrize(
    ("wanted", "kind", "said"),
    [
        ({"status": 429}, FailureKind.INFRA, "GymHttpError: the_agent at http"),
        ({"status": 500}, FailureKind.INFRA, "answered 500: slow down"),
        ({"status": 400}, FailureKind.DATA, "answered 400"),
        ({"body": "{"}, FailureKind.DATA, "GymAnswerError"),
        ({"body": "{}"}, FailureKind.DATA, "no response"),
        ({"body": '{"response": {"output": []}, "reward": 1.0}'}, FailureKind.DATA, "GymNoTokensError"),
        ({"reward": "much"}, FailureKind.DATA, "reward"),
    ],
)
def test_k5_c11_a_failure_is_a_record_with_its_kind_and_touches_no_sibling(
    wanted: dict, kind: FailureKind, said: str, head_url: str
) -> None:
    with GymSession(config(), head_url=head_url) as session:
        results = run(session, *(request(n, **(wanted if n == 3 else {})) for n in range(10)))
    outcomes = {result.request.rollout_id: result.outcome for result in results}
    failed = outcomes.pop("r3")
    assert isinstance(failed, RolloutFailure)
    assert (failed.kind, failed.group_id, failed.rollout_id, failed.agent) == (kind, "g", "r3", AGENT)
    assert said in failed.error
    assert [type(outcome) for outcome in outcomes.values()] == [Trajectory] * 9


def test_an_unknown_agent_is_the_rows_fault(head_url: str) -> None:
    with GymSession(config(), head_url=head_url) as session:
        (result,) = run(session, request(agent="the_agnet"))
    assert failure(result).kind is FailureKind.DATA
    assert "did you mean 'the_agent'?" in failure(result).error


def test_penalties_and_efforts_of_the_config_are_taken(head_url: str) -> None:
    settings = config(
        penalties=RewardPenalties(invalid_tool_call=0.25),
        effort_levels=(EffortLevel("low", token_budget=1, token_penalty=0.5),),
    )
    says = "<tool_call>{}"
    with GymSession(settings, head_url=head_url) as session:
        plain, low, unknown = sorted(
            run(
                session, request(0, says=says), request(1, effort="low"), request(2, effort="max", says=says)
            ),
            key=lambda result: result.request.rollout_id,
        )
    assert [result.outcome.reward for result in (plain, low)] == [0.75, 0.5]  # type: ignore[union-attr]
    assert "'max', which is none of low" in failure(unknown).error


def test_a_tokenizer_adds_text_to_the_answers_that_are_kept(head_url: str) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            if 3 in ids:
                raise ValueError("no text")
            return "".join(chr(96 + token) for token in ids)

    with GymSession(config(), head_url=head_url) as session:
        (before,) = run(session, request())
        session.set_tokenizer(Tokenizer())
        (after,) = run(session, request())
        with pytest.raises(GymConfigError, match=r"int has no decode"):
            session.set_tokenizer(3)
    assert before.answer is not None and after.answer is not None  # noqa: PT018
    (item,) = before.answer["response"]["output"]
    (shown,) = after.answer["response"]["output"]
    assert shown == {
        **item,
        "prompt_str": "ab",
        "generation_str": "(not decoded: ValueError: no text)",
    }
    assert isinstance(after.outcome, Trajectory)


def counted_at(url: str, what: str) -> int:
    """How many rollouts the agent is ``running``, or has ``answered``."""
    return int(httpx.get(f"{url}/{what}", trust_env=False).text)


async def until(holds: Callable[[], bool]) -> None:
    """Ask in another thread until it holds, which a busy machine may take a while for."""
    end = time.monotonic() + SOON_S
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("layer", ["session", "actor"])
def test_leaving_early_leaves_no_task_and_nothing_that_runs_at_the_agent(layer: str, head_url: str) -> None:
    async def main() -> None:
        actor = NemoGym(config(), head_url=head_url)
        await actor.start()
        session = actor._session
        url = session.agents[AGENT]
        runner = session if layer == "session" else actor
        rollouts = runner.run_rollouts([request(0), *(request(n, hang_s=60) for n in range(1, 20))])
        assert (await anext(rollouts)).request.rollout_id == "r0"
        await until(lambda: counted_at(url, "running") == 19)
        await rollouts.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await until(lambda: counted_at(url, "running") == 0)
        await actor.shutdown()

    asyncio.run(main())


def test_what_had_arrived_before_a_shutdown_is_kept(head_url: str) -> None:
    async def main(session: GymSession) -> list[RolloutResult]:
        results = []
        twice = request(30, hang_s=60)
        many = [
            *(request(n) for n in range(20)),
            *(request(n, hang_s=60) for n in range(20, 25)),
            twice,
            twice,
        ]
        url = session.agents[AGENT]
        async for result in session.run_rollouts(many):
            if not results:
                # All that is quick has been answered, and none of it is read.
                await until(lambda: counted_at(url, "answered") == 20 and counted_at(url, "running") == 7)
                await asyncio.sleep(0.3)
                session.shutdown()
                await asyncio.sleep(0.05)
            results.append(result)
        return results

    began = time.monotonic()
    with GymSession(config(), head_url=head_url) as session:
        results = asyncio.run(main(session))
    took = time.monotonic() - began
    kept = [result for result in results if isinstance(result.outcome, Trajectory)]
    assert sorted(result.request.rollout_id for result in kept) == sorted(f"r{n}" for n in range(20))
    ended = [result for result in results if isinstance(result.outcome, RolloutFailure)]
    assert sorted(result.request.rollout_id for result in ended) == [
        "r20",
        "r21",
        "r22",
        "r23",
        "r24",
        "r30",
        "r30",
    ]
    for result in ended:
        assert failure(result).kind is FailureKind.INFRA
        assert (
            "the session was shut down meanwhile; the rollout at the_agent was ended" in failure(result).error
        )
        assert result.attempts == 1
        assert 0.3 < result.seconds < took


def test_a_failure_that_is_the_rows_stays_one_after_a_shutdown(head_url: str) -> None:
    async def main(session: GymSession) -> list[RolloutResult]:
        results = []
        url = session.agents[AGENT]
        async for result in session.run_rollouts([request(0), request(1, hang_s=0.2, status=400)]):
            if not results:
                await until(lambda: counted_at(url, "answered") == 2)
                await asyncio.sleep(0.3)
                session.shutdown()
            results.append(result)
        return results

    with GymSession(config(), head_url=head_url) as session:
        results = {result.request.rollout_id: result for result in asyncio.run(main(session))}
    assert failure(results["r1"]).kind is FailureKind.DATA
    assert "answered 400" in failure(results["r1"]).error


def test_the_watch_keeps_no_loop_that_has_ended() -> None:
    class Well:
        def check(self) -> None:
            pass

        def health(self, timeout_s: float = 1.0) -> None:
            pass

    watch = HealthWatch(Well())
    loops = []

    async def ask() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        assert isinstance(await watch.explained(GymTimeout("x")), GymTimeout)

    for _ in range(5):
        asyncio.run(ask())
    gc.collect()
    assert [loop() for loop in loops] == [None] * 5


def test_a_gym_that_cannot_be_seen_is_not_taken_for_dead() -> None:
    class Unseen:
        def check(self) -> None:
            raise GymStateUnknown("no file descriptor is left")

        def health(self, timeout_s: float = 1.0) -> None:
            raise GymStateUnknown("no file descriptor is left")

    async def main() -> None:
        watch, stop, error = HealthWatch(Unseen()), asyncio.Event(), GymTimeout("x")
        async with watch.watching(stop):
            await asyncio.sleep(0.05)
            assert await watch.explained(error) is error
        assert not watch.is_dead()
        assert not stop.is_set()

    asyncio.run(main())


def test_a_session_works_on_one_loop_after_another_and_on_two_at_once(head_url: str) -> None:
    with GymSession(config(), head_url=head_url) as session:
        results: list[list[RolloutResult]] = []
        threads = [
            threading.Thread(target=lambda: results.append(run(session, *(request(n) for n in range(10)))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        results.append(run(session, request()))
    assert [len(batch) for batch in results] == [10, 10, 10, 10, 1]


def test_no_connection_is_left_when_the_last_run_on_a_loop_has_ended(head_url: str) -> None:
    def sockets() -> int:
        # The listing's own descriptor is gone by then.
        links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link).rpartition("/")[2].startswith("socket:") for link in links)

    async def counted(session: GymSession) -> tuple[int, list[int], int]:
        before, during = sockets(), []
        async for _ in session.run_rollouts([request(n) for n in range(8)]):
            during.append(sockets())
        return before, during, sockets()

    with GymSession(config(), head_url=head_url) as session:
        before, during, after = asyncio.run(counted(session))
    assert max(during) > before
    assert after == before


def test_runs_on_one_loop_share_the_bound_on_concurrency(
    other_gym: Callable[..., tuple[str, Any]],
) -> None:
    head, _ = other_gym()
    most = 0

    async def both(session: GymSession) -> None:
        nonlocal most
        runs = asyncio.gather(
            *(collected(session, *(request(n, hang_s=0.2) for n in range(6))) for _ in range(3))
        )
        async with httpx.AsyncClient(trust_env=False) as looker:
            while not runs.done():
                most = max(most, int((await looker.get(f"{session.agents[AGENT]}/running")).text))
                await asyncio.sleep(0.02)
        await runs

    with GymSession(config(max_concurrency=3), head_url=head) as session:
        asyncio.run(both(session))
    assert most == 3


# --- before, after and without a Gym ---


def test_nothing_runs_before_the_start_or_after_the_end(head_url: str) -> None:
    session = GymSession(config(), head_url=head_url)
    with pytest.raises(GymUnavailable, match="it is not started"):
        run(session, request())
    with pytest.raises(GymUnavailable, match="it is not started"):
        asyncio.run(session.health_check())
    session.start()
    with pytest.raises(GymUnavailable, match="cannot be started: it is running"):
        session.start()
    session.shutdown()
    session.shutdown()
    with pytest.raises(GymUnavailable, match="it is shut down"):
        run(session, request())
    with pytest.raises(GymUnavailable, match="cannot be started: it is shut down"):
        session.start()


def test_a_shutdown_while_it_attaches_stays_one(other_gym: Callable[..., tuple[str, Any]]) -> None:
    (port,) = free_ports(1)
    head, _ = other_gym("200", f"http://127.0.0.1:{port}")
    session = GymSession(config(), head_url=head)
    threading.Timer(0.5, session.shutdown).start()
    with engine(port, "/", 1.0), pytest.raises(GymUnavailable, match="shut down while it started"):
        session.start()
    with pytest.raises(GymUnavailable, match="it is shut down"):
        run(session, request())


def test_a_shutdown_ends_rollouts_at_a_gym_that_goes_on(head_url: str) -> None:
    session = GymSession(config(), head_url=head_url).start()
    threading.Timer(0.5, session.shutdown).start()
    began = time.monotonic()
    results = run(session, *(request(n, hang_s=60) for n in range(5)))
    assert time.monotonic() - began < SOON_S
    assert len(results) == 5
    for result in results:
        assert failure(result).kind is FailureKind.INFRA
        assert "the session was shut down" in failure(result).error


def test_a_shutdown_before_the_start_is_nothing_and_stays(head_url: str) -> None:
    session = GymSession(config(), head_url=head_url)
    session.shutdown()
    with pytest.raises(GymUnavailable, match="it is shut down"):
        session.start()


@pytest.mark.parametrize(
    ("status", "kind"), [(429, FailureKind.INFRA), (500, FailureKind.INFRA), (400, FailureKind.DATA)]
)
def test_k10_a_head_server_that_answers_with_an_error_is_typed(
    status: int, kind: FailureKind, other_gym: Callable[..., tuple[str, Any]]
) -> None:
    head, _ = other_gym(str(status))
    with pytest.raises(GymHttpError) as caught:
        GymSession(config(), head_url=head).start()
    assert (caught.value.status, caught.value.kind, caught.value.component) == (status, kind, "head server")


def test_a_head_server_that_is_not_there_is_waited_for_and_then_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(GymUnavailable, match=rf"head server at http://127\.0\.0\.1:{port}/server_instances"):
        GymSession(config(start_timeout_s=0.5), head_url=f"http://127.0.0.1:{port}").start()
    assert 0.2 < time.monotonic() - began < SOON_S


def test_a_listed_server_that_does_not_answer_is_named(other_gym: Callable[..., tuple[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        head, _ = other_gym("200", url)
        with pytest.raises(GymTimeout, match="judge: did not answer") as caught:
            GymSession(config(start_timeout_s=2.0), head_url=head).start()
    assert caught.value.component == "judge"


def test_a_server_on_another_machine_is_refused(other_gym: Callable[..., tuple[str, Any]]) -> None:
    head, _ = other_gym("200", "http://192.0.2.1:80")
    with pytest.raises(GymAnswerError, match="judge: the head server lists it at http://192") as caught:
        GymSession(config(), head_url=head).start()
    assert caught.value.component == "judge"


def test_an_agent_that_went_away_is_named_in_the_failures(
    other_gym: Callable[..., tuple[str, subprocess.Popen[str]]],
) -> None:
    head, process = other_gym()
    with GymSession(config(), head_url=head) as session:
        process.kill()
        process.wait(10)
        began = time.monotonic()
        results = run(session, *(request(n) for n in range(50)))
        with pytest.raises(GymServerDied, match="the_agent: refuses connections"):
            asyncio.run(session.health_check())
    assert time.monotonic() - began < SOON_S
    assert len(results) == 50
    for result in results:
        assert failure(result).kind is FailureKind.INFRA
        assert "GymServerDied" in failure(result).error
        assert "the_agent: refuses connections" in failure(result).error
        assert "the rollout at the_agent: no connection" in failure(result).error


# --- model servers with reserved addresses ---


class Ready(BaseHTTPRequestHandler):
    path_that_works = "/health"

    def do_GET(self) -> None:
        status = 200 if self.path == self.path_that_works else 404
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def engine(port: int, path: str, after_s: float) -> Iterator[None]:
    """Serves ``path`` at ``port`` after so many seconds."""
    servers: list[ThreadingHTTPServer] = []

    def serve() -> None:
        handler = type("Handler", (Ready,), {"path_that_works": path})
        servers.append(ThreadingHTTPServer(("127.0.0.1", port), handler))
        servers[0].serve_forever(0.05)

    timer = threading.Timer(after_s, serve)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for server in servers:
            server.shutdown()
            server.server_close()


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in opened]


def test_the_addresses_at_which_a_server_says_that_it_is_ready() -> None:
    assert readiness_urls("http://h:1/v1") == ("http://h:1/health", "http://h:1/v1/models")
    assert readiness_urls("http://h:1") == ("http://h:1/health", "http://h:1/models")


def test_the_first_rollout_waits_for_deferred_model_servers_and_later_ones_do_not(head_url: str) -> None:
    ports = free_ports(2)
    urls = tuple(f"http://127.0.0.1:{port}/v1" for port in ports)
    settings = config(base_urls=DeferredBaseUrls(urls, 30.0))
    began = time.monotonic()
    with GymSession(settings, head_url=head_url) as session:
        started = time.monotonic() - began
        with engine(ports[0], "/health", 0.5), engine(ports[1], "/v1/models", 0.8):
            (result,) = run(session, request())
            waited = time.monotonic() - began - started
        # They are gone again; nobody asks any more.
        (later,) = run(session, request())
    # Neither waits for all of the time that the servers have.
    assert started < 20
    assert 0.7 < waited < 20
    assert isinstance(result.outcome, Trajectory)
    assert isinstance(later.outcome, Trajectory)


def test_a_deferred_model_server_that_does_not_come_up_is_named(head_url: str) -> None:
    ports = free_ports(3)
    urls = tuple(f"http://127.0.0.1:{port}/v1" for port in ports)
    settings = config(base_urls=DeferredBaseUrls(urls, 2.0))
    with GymSession(settings, head_url=head_url) as session, engine(ports[0], "/health", 0.0):
        began = time.monotonic()
        with pytest.raises(GymStartError) as caught:
            run(session, request())
        assert time.monotonic() - began < SOON_S
        # It is asked again next time.
        with engine(ports[1], "/health", 0.0), engine(ports[2], "/health", 0.0):
            (result,) = run(session, request())
    message = str(caught.value)
    assert "2 of 3 model servers did not come up" in message
    assert urls[1] in message
    assert urls[2] in message
    assert urls[0] not in message
    assert (caught.value.kind, caught.value.address) == (FailureKind.INFRA, urls[1])
    assert isinstance(result.outcome, Trajectory)


def test_a_server_that_answers_but_is_not_ready_is_waited_for_and_quoted(head_url: str) -> None:
    (port,) = free_ports(1)
    settings = config(base_urls=DeferredBaseUrls((f"http://127.0.0.1:{port}/v1",), 2.0))
    with (
        GymSession(settings, head_url=head_url) as session,
        engine(port, "/loading", 0.0),
        pytest.raises(GymStartError, match=r"/(health|v1/models) answers with status 404"),
    ):
        run(session, request())


def test_a_shutdown_while_it_waits_for_model_servers_ends_the_wait(head_url: str) -> None:
    (port,) = free_ports(1)
    settings = config(base_urls=DeferredBaseUrls((f"http://127.0.0.1:{port}/v1",), 30.0))
    session = GymSession(settings, head_url=head_url).start()
    timer = threading.Timer(0.5, session.shutdown)
    timer.start()
    began = time.monotonic()
    results = run(session, request(0), request(1))
    assert 0.4 < time.monotonic() - began < SOON_S
    assert sorted(result.request.rollout_id for result in results) == ["r0", "r1"]
    for result in results:
        assert failure(result).kind is FailureKind.INFRA
        assert "the session was shut down meanwhile" in failure(result).error
        assert result.attempts == 0


def test_a_death_while_it_waits_for_model_servers_ends_the_wait(gym_python: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    deferred = DeferredBaseUrls((f"http://127.0.0.1:{port}/v1",), 30.0)
    settings = {"double": {"poll_s": 30}}
    with own(gym_python, tmp_path, base_urls=deferred, gym_config=settings) as session:
        victim = pid_of(session, "answers")
        threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        (result,) = run(session, request(agent="answers_agent"))
        assert time.monotonic() - began < SOON_S
    assert failure(result).error.startswith("GymServerDied: answers")
    assert result.attempts == 0


# --- a Gym of its own ---


@pytest.fixture
def gym_python(tmp_path: Path) -> str:
    """An interpreter that says it has Gym 0.4.0, whose command is the double."""
    folder = tmp_path / "gym" / "bin"
    folder.mkdir(parents=True)
    facts = {"python": [3, 12, 1], "version": "0.4.0", "prefix": str(tmp_path / "gym")}
    said = json.dumps({**facts, "found": True, "checkout": False})
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\ncase \"$*\" in *importlib.metadata*) echo '{said}' ;; "
        f'*) exec {sys.executable} "$@" ;; esac\n'
    )
    python.chmod(0o755)
    gym = folder / "gym"
    gym.write_text((DOUBLES / "gym_command.py").read_text())
    gym.chmod(0o755)
    return str(python)


def own(gym_python: str, tmp_path: Path, **changes: Any) -> GymSession:
    values = {
        "python": gym_python,
        "work_dir": str(tmp_path),
        "start_timeout_s": 30.0,
        "shutdown_timeout_s": 3.0,
    }
    return GymSession(config(**{**values, **changes}))


def pid_of(session: GymSession, name: str) -> int:
    return session._gym.servers[name].process.pid  # type: ignore[union-attr]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def pids(session: GymSession) -> list[int]:
    return [pid_of(session, name) for name in ("policy_model", "answers", "answers_agent")]


def test_it_starts_a_gym_and_ends_it(gym_python: str, tmp_path: Path) -> None:
    with own(gym_python, tmp_path) as session:
        family = pids(session)
        assert all(alive(pid) for pid in family)
        health = asyncio.run(session.health_check())
        assert health.servers == ("answers", "answers_agent", "policy_model")
        assert health.agents == ("answers_agent",)
    assert gone(family)


def test_an_async_block_ends_it_after_an_error_too(gym_python: str, tmp_path: Path) -> None:
    family: list[int] = []

    async def fails() -> None:
        async with own(gym_python, tmp_path) as session:
            family.extend(pids(session))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fails())
    assert len(family) == 3
    assert gone(family)


def test_a_server_that_is_killed_while_rollouts_wait_for_it_is_named_at_once(
    gym_python: str, tmp_path: Path
) -> None:
    """The agent waits for ever; nothing but a look at the processes tells that its server is dead."""
    # Gym itself has not noticed yet.
    settings = {"double": {"poll_s": 30}}
    with own(gym_python, tmp_path, gym_config=settings) as session:
        victim = pid_of(session, "answers")
        threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        results = run(session, *(request(n, agent="answers_agent") for n in range(30)))
        took = time.monotonic() - began
        with pytest.raises(GymServerDied, match="answers"):
            run(session, request(agent="answers_agent"))
    assert took < SOON_S
    assert sorted(result.request.rollout_id for result in results) == sorted(f"r{n}" for n in range(30))
    for result in results:
        assert failure(result).kind is FailureKind.INFRA
        assert failure(result).error.startswith("GymServerDied: ")
        assert "answers" in failure(result).error


def test_a_shutdown_ends_rollouts_that_run(gym_python: str, tmp_path: Path) -> None:
    with own(gym_python, tmp_path) as session:
        family = pids(session)
        threading.Timer(0.5, session.shutdown, (2.0,)).start()
        began = time.monotonic()
        results = run(session, *(request(n, agent="answers_agent") for n in range(5)))
        assert time.monotonic() - began < SOON_S
        assert gone(family)
    assert len(results) == 5
    for result in results:
        assert failure(result).kind is FailureKind.INFRA
        assert "the session was shut down" in failure(result).error


def test_a_shutdown_while_it_starts_ends_the_start(gym_python: str, tmp_path: Path) -> None:
    session = own(gym_python, tmp_path, gym_config={"double": {"list_after_s": 60}})
    threading.Timer(1.0, session.shutdown, (2.0,)).start()
    began = time.monotonic()
    with pytest.raises(GymStartError, match="shut down"):
        session.start()
    assert time.monotonic() - began < SOON_S
    with pytest.raises(GymUnavailable):
        run(session, request())


@pytest.mark.parametrize("seconds", [0.0, 0, -1.0])
def test_a_shutdown_without_time_kills_at_once(seconds: float, gym_python: str, tmp_path: Path) -> None:
    stubborn = {"double": {"stubborn": True}}
    session = own(gym_python, tmp_path, shutdown_timeout_s=60.0, gym_config=stubborn).start()
    family = pids(session)
    began = time.monotonic()
    session.shutdown(seconds)
    assert time.monotonic() - began < 4
    assert gone(family, 1.0)
    assert session._gym.config.shutdown_timeout_s == 60.0  # type: ignore[union-attr]
    GymSession(config()).shutdown(seconds)
