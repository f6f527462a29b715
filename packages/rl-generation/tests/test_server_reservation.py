"""An address that answers before its engine is there, and gives itself back."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rl_generation.failures import EngineDeadError, InfraError, StaleWeightsError
from rl_generation.server.asgi import send_json
from rl_generation.server.reservation import ListenSettings, Reservation
from rl_generation.server.security import check_token, is_loopback

pytest.importorskip("uvicorn")


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, 200, {"path": scope["path"]})


async def never(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


def get(reservation: Reservation, path: str = "/", token: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.get(reservation.url + path, headers=headers, timeout=10, trust_env=False)


@pytest.fixture
def reservation() -> Iterator[Reservation]:
    made = Reservation(ListenSettings())
    yield made
    made.close(timeout_s=2)


def test_it_answers_before_and_after_the_application_comes(reservation: Reservation) -> None:
    early = get(reservation, "/health")
    assert (early.status_code, early.json()["error"]["type"]) == (503, "NotReadyError")
    assert early.headers["retry-after"]
    assert reservation.base_url == f"{reservation.url}/v1"
    reservation.attach(hello)
    assert get(reservation, "/x").json() == {"path": "/x"}


def test_stale_weights_serve_nothing_until_reopened(reservation: Reservation) -> None:
    reservation.attach(hello)
    reservation.shut(StaleWeightsError("r0: its weights are of version 3"))
    refused = get(reservation)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "StaleWeightsError")
    reservation.reopen()
    assert get(reservation).status_code == 200


def test_it_cannot_be_reopened_before_there_is_an_application(reservation: Reservation) -> None:
    with pytest.raises(RuntimeError, match="no application"):
        reservation.reopen()


def test_requests_in_flight_are_cut_when_the_engine_dies(reservation: Reservation) -> None:
    reservation.attach(never)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(get(reservation)))
    thread.start()
    deadline = time.monotonic() + 5
    while not reservation.in_flight and time.monotonic() < deadline:
        time.sleep(0.005)
    reservation.shut(EngineDeadError("r0: the engine died"))
    thread.join(5)
    assert [answer.json()["error"]["type"] for answer in answers] == ["EngineDeadError"]
    assert reservation.in_flight == 0


def test_moving_to_the_engines_loop_turns_nobody_away() -> None:
    """Requests all the time while the socket changes hands: each is answered, early or late."""

    async def run() -> tuple[list[int], str]:
        reservation = Reservation(ListenSettings())
        here = threading.get_ident()
        threads: set[int] = set()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            threads.add(threading.get_ident())
            await hello(scope, receive, send)

        async with httpx.AsyncClient(base_url=reservation.url, trust_env=False) as client:

            async def ask_on() -> list[int]:
                statuses: list[int] = []
                while statuses.count(200) < 5:
                    statuses.append((await client.get("/")).status_code)
                    await asyncio.sleep(0.002)
                return statuses

            asking = asyncio.ensure_future(ask_on())
            await asyncio.sleep(0.05)
            await reservation.attach_here(app)
            statuses = await asyncio.wait_for(asking, 20)
        assert threads == {here}
        await reservation.aclose(2)
        return statuses, reservation.url

    statuses, url = asyncio.run(run())
    assert set(statuses) == {200, 503}
    assert statuses == sorted(statuses, reverse=True)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_an_engine_that_starts_again_has_its_address_all_the_time() -> None:
    """Its event loop ends and another one comes; meanwhile the address says why nothing is served."""
    reservation = Reservation(ListenSettings())

    async def serve_and_leave(properly: bool) -> None:
        await reservation.attach_here(hello)
        assert (await asyncio.to_thread(get, reservation)).status_code == 200
        if properly:
            await reservation.detach(EngineDeadError("r0: the engine died"))

    asyncio.run(serve_and_leave(True))
    assert get(reservation).json()["error"]["type"] == "EngineDeadError"
    # This time the loop ends without a word.
    asyncio.run(serve_and_leave(False))
    asyncio.run(reservation.detach(EngineDeadError("r0: the engine died again")))
    assert get(reservation).json()["error"]["type"] == "EngineDeadError"
    asyncio.run(reservation.aclose(2))
    with pytest.raises(httpx.ConnectError):
        get(reservation)


def test_it_can_be_left_from_another_loop() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    reservation = Reservation(ListenSettings())
    asyncio.run_coroutine_threadsafe(reservation.attach_here(hello), loop).result(10)
    assert get(reservation).status_code == 200
    with pytest.raises(RuntimeError, match="aclose"):
        reservation.close()
    asyncio.run(reservation.aclose(2))
    with pytest.raises(httpx.ConnectError):
        get(reservation)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def test_its_port_is_free_again_and_can_be_had_again() -> None:
    first = Reservation(ListenSettings())
    first.attach(hello)
    assert get(first).status_code == 200
    first.close()
    first.close()
    with pytest.raises(httpx.ConnectError):
        get(first)
    again = Reservation(ListenSettings(), preferred_port=first.port)
    assert again.port == first.port
    # Somebody else has it now, so another one is taken.
    third = Reservation(ListenSettings(), preferred_port=first.port)
    assert third.port != first.port
    again.close()
    third.close()


def test_it_ends_in_time_with_a_request_that_never_does() -> None:
    reservation = Reservation(ListenSettings())
    reservation.attach(never)
    with socket.create_connection(("127.0.0.1", reservation.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        deadline = time.monotonic() + 5
        while not reservation.in_flight and time.monotonic() < deadline:
            time.sleep(0.005)
        began = time.monotonic()
        reservation.close(timeout_s=2)
        assert time.monotonic() - began < 3
        assert not any(t.name == "rl-generation-server" for t in threading.enumerate())


def test_a_range_of_ports_is_tried_in_turn() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(InfraError, match=str(taken)) as failure:
            Reservation(ListenSettings(port=taken))
        assert isinstance(failure.value.__cause__, OSError)
        last = min(taken + 40, 65535)
        reservation = Reservation(ListenSettings(port_range=(taken, last)))
        assert taken < reservation.port <= last
        reservation.close()


def test_only_loopback_may_be_without_a_token() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with pytest.raises(ValueError, match="token"):
            ListenSettings(host=host, advertised_host="x")
    with pytest.raises(ValueError, match="advertised_host"):
        ListenSettings(host="0.0.0.0", token="t")
    with pytest.raises(ValueError, match="empty"):
        ListenSettings(token=" ")
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost", "10.0.0.1")] == [
        *(True,) * 4,
        False,
    ]


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "s3\ncret", "s3\tcret", "s3crét", "s3cret\u00a0"])
def test_a_token_that_no_request_could_carry_is_refused_and_not_said(token: str) -> None:
    with pytest.raises(ValueError, match="the server's token") as refused:
        ListenSettings(token=token)
    assert "\n" not in str(refused.value)
    assert "s3" not in str(refused.value)


def test_every_token_that_is_taken_lets_its_bearer_in() -> None:
    for token in ("s3cret", "two words", "!#$%&'()*+,-./:;<=>?@[]^_`{|}~"):
        settings = ListenSettings(token=token)
        check_token({"headers": [(b"authorization", f"Bearer {token}".encode())]}, settings.token)


def test_a_wide_address_is_announced_by_its_name_and_keeps_its_token_to_itself() -> None:
    settings = ListenSettings(host="0.0.0.0", token="s3cret", advertised_host="localhost")
    assert "s3cret" not in repr(settings)
    reservation = Reservation(settings)
    try:
        reservation.attach(hello)
        assert reservation.url == f"http://localhost:{reservation.port}"
        wrong = get(reservation, token="wrong")
        assert wrong.status_code == 401
        assert "s3cret" not in wrong.text
        assert get(reservation, token="s3cret").status_code == 200
        assert get(reservation, "/health").status_code == 200
    finally:
        reservation.close()


@pytest.mark.parametrize(
    "settings", [{"port": -1}, {"port": 70000}, {"port_range": (9, 8)}, {"port_range": (0, 3)}]
)
def test_ports_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ports"):
        ListenSettings(**settings)
