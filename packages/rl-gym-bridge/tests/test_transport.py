"""What each HTTP library makes of servers that behave and that do not, over real sockets of the loopback."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_gym_bridge.failures import (
    GymAnswerError,
    GymConnectionLost,
    GymError,
    GymTimeout,
    GymUnavailable,
)
from rl_gym_bridge.transport import aiohttp_transport, httpx_transport
from rl_gym_bridge.transport.aiohttp_transport import AiohttpTransport
from rl_gym_bridge.transport.base import KEEPALIVE_S, Transport
from rl_gym_bridge.transport.httpx_transport import HttpxTransport

TRANSPORTS: dict[str, Callable[..., Transport]] = {"httpx": HttpxTransport, "aiohttp": AiohttpTransport}
both = pytest.mark.parametrize("make", TRANSPORTS.values(), ids=TRANSPORTS)
Use = Callable[[Transport], Awaitable[Any]]


def using(make: Callable[..., Transport], use: Use, **settings: Any) -> Any:
    """Run ``use`` with a transport of its own; afterwards no task is left."""

    async def main() -> Any:
        transport = make(**settings)
        try:
            return await use(transport)
        finally:
            await transport.aclose()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert {
                task for task in left if "Loopback" not in repr(task) and "respond" not in repr(task)
            } == set()

    return asyncio.run(main())


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@both
def test_a_post_carries_body_and_headers_and_brings_status_and_content(
    make: Any, loopback: Any, answer: Any
) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer(201, b"\xff raw", "Retry-After: 7"))

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            got = await transport.post(
                f"{server.url}/run", b'{"a":1}', timeout_s=5, headers={"Idempotency-Key": "r1"}
            )
            assert (got.status, got.body, got.retry_after) == (201, b"\xff raw", "7")
            (request,) = server.requests
            assert (request.method, request.path, request.body) == ("POST", "/run", b'{"a":1}')
            assert request.headers["idempotency-key"] == "r1"
            assert request.headers["content-type"] == "application/json"
            assert request.headers["accept-encoding"] == "identity"
            assert (await transport.get(server.url, timeout_s=5)).retry_after == "7"
            assert server.requests[1].method == "GET"

    using(make, use)


@both
def test_connections_are_used_again_and_no_cookie_ever_comes_back(
    make: Any, loopback: Any, answer: Any
) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer(200, {}, "Set-Cookie: session=of-another-rollout; Path=/"))

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            for _ in range(20):
                await transport.post(server.url, b"{}", timeout_s=5)
            assert server.connections == 1
            assert [request for request in server.requests if "cookie" in request.headers] == []

    using(make, use)


@both
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_n1_a_redirect_is_an_answer_and_its_target_is_never_asked(
    make: Any, loopback: Any, answer: Any, status: int
) -> None:
    async def canary(request: Any, writer: Any) -> None:
        writer.write(answer())

    async def use(transport: Transport) -> None:
        async with loopback(canary) as target:

            async def respond(request: Any, writer: Any) -> None:
                writer.write(answer(status, b"", f"Location: {target.url}/"))

            async with loopback(respond) as server:
                assert (await transport.post(server.url, b"{}", timeout_s=5)).status == status
                assert (await transport.get(server.url, timeout_s=5)).status == status
            assert (target.requests, target.connections) == ([], 0)

    using(make, use)


@both
def test_proxies_and_credentials_of_the_environment_are_not_used(
    make: Any, loopback: Any, answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))

    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer())

    async def use(transport: Transport) -> None:
        async with loopback(respond) as proxy, loopback(respond) as server:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
                monkeypatch.setenv(name, proxy.url)
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            await transport.post(server.url, b"{}", timeout_s=5)
            assert proxy.connections == 0
            assert "authorization" not in server.requests[0].headers

    using(make, use)


@both
def test_what_never_reached_a_server_says_so(make: Any) -> None:
    async def use(transport: Transport) -> None:
        for url in (f"http://127.0.0.1:{closed_port()}/run", "http://name.invalid/run"):
            with pytest.raises(GymUnavailable) as caught:
                await transport.post(url, b"{}", timeout_s=20)
            assert caught.value.address == url
            assert caught.value.__cause__ is not None
        await transport.aclose()
        with pytest.raises(GymUnavailable, match="closed"):
            await transport.post("http://127.0.0.1:1", b"{}", timeout_s=1)

    using(make, use)


@pytest.mark.faults
@both
def test_a_connection_that_does_not_come_about_is_given_up_before_the_deadline(make: Any) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())

        async def use(transport: Transport) -> None:
            started = time.monotonic()
            with pytest.raises(GymUnavailable):
                await transport.post(url, b"{}", timeout_s=60)
            assert time.monotonic() - started < 20

        try:
            using(make, use, connect_timeout_s=0.3)
        finally:
            for one in waiting:
                one.close()


@both
@pytest.mark.parametrize("url", ["ftp://127.0.0.1/run", "http://127.0.0.1:port/"])
def test_what_is_no_url_is_the_callers_fault(make: Any, url: str) -> None:
    async def use(transport: Transport) -> None:
        with pytest.raises(GymError, match="not a URL") as caught:
            await transport.post(url, b"{}", timeout_s=1)
        assert type(caught.value) is GymError

    using(make, use)


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.close()


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "half of the head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "less than announced": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"{" * 40,
    "half a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{}",
    "no last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "garbage": b"\0\1\2 this is no HTTP\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
}


@pytest.mark.faults
@both
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
def test_what_may_have_been_delivered_says_so(make: Any, loopback: Any, sent: bytes, how: str) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(sent)
        await writer.drain()
        if how == "reset":
            await asyncio.sleep(0.02)
            await reset(writer)
        else:
            writer.close()

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            with pytest.raises(GymConnectionLost):
                await transport.post(f"{server.url}/run", b"{}", timeout_s=10)
            assert len(server.requests) == 1

    using(make, use)


@pytest.mark.faults
@both
def test_a_slow_drip_ends_at_the_deadline(make: Any, loopback: Any) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.05)

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            started = time.monotonic()
            with pytest.raises(GymTimeout) as caught:
                await transport.post(server.url, b"{}", timeout_s=0.6)
            took = time.monotonic() - started
            # All of it would take 50 s.
            assert 0.5 < took < 20
            assert 0.5 < caught.value.elapsed_s <= took
            await server.idles(open=0)

    using(make, use)


CLOSING = """
import socket
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
while True:
    connection, _ = listening.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    connection.close()
"""


@contextmanager
def closing_server() -> Iterator[tuple[str, int]]:
    """URL and pid of a server in a process of its own that closes after each answer."""
    with subprocess.Popen([sys.executable, "-c", CLOSING], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/run", server.pid
        finally:
            server.kill()


@pytest.mark.faults
@both
def test_a_stopped_server_is_a_timeout_at_the_deadline(make: Any) -> None:
    with closing_server() as (url, pid):

        async def use(transport: Transport) -> None:
            assert (await transport.post(url, b"{}", timeout_s=5)).body == b"{}"
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(GymTimeout):
                await transport.post(url, b"{}", timeout_s=0.5)
            assert 0.4 < time.monotonic() - started < 20

        using(make, use)


@both
@pytest.mark.parametrize("framing", ["length", "chunked", "until closed"])
def test_an_answer_that_is_too_long_is_not_read_to_its_end(make: Any, loopback: Any, framing: str) -> None:
    sent = 0

    async def respond(request: Any, writer: Any) -> None:
        nonlocal sent
        head = {
            "length": "Content-Length: 1000000000",
            "chunked": "Transfer-Encoding: chunked",
            "until closed": "X: y",
        }
        writer.write(f"HTTP/1.1 200 OK\r\n{head[framing]}\r\n\r\n".encode())
        for _ in range(1000):
            writer.write((b"10000\r\n%b\r\n" if framing == "chunked" else b"%b") % (b" " * 65536))
            await writer.drain()
            sent += 65536

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            with pytest.raises(GymAnswerError, match="longer than 1000000 bytes"):
                await transport.post(server.url, b"{}", timeout_s=10)
            await server.idles(open=0)

    using(make, use, max_answer_bytes=1_000_000)
    assert sent < 40_000_000


@both
def test_a_compressed_answer_is_refused_unopened(make: Any, loopback: Any, answer: Any) -> None:
    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer(200, gzip.compress(b"0" * 10_000_000), "Content-Encoding: gzip"))

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            with pytest.raises(GymAnswerError, match="gzip"):
                await transport.post(server.url, b"{}", timeout_s=10)

    using(make, use)


@pytest.mark.faults
@both
def test_a_post_is_never_sent_twice_when_a_kept_connection_breaks(
    make: Any, loopback: Any, answer: Any
) -> None:
    async def respond(request: Any, writer: Any) -> None:
        if len(server_requests) % 2 == 0:
            writer.close()
        else:
            writer.write(answer())

    server_requests: list[Any] = []

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            nonlocal server_requests
            server_requests = server.requests
            for index in range(100):
                key = {"Idempotency-Key": str(index)}
                try:
                    await transport.post(server.url, b"{}", timeout_s=5, headers=key)
                except GymConnectionLost:
                    assert index % 2 == 1
            assert [request.headers["idempotency-key"] for request in server.requests] == list(
                map(str, range(100))
            )

    using(make, use)


@both
def test_connections_that_the_server_closed_after_an_answer_are_seldom_used(make: Any) -> None:
    """A server that closes without saying so: one that uses what it kept loses every second request."""
    with closing_server() as (url, _):

        async def use(transport: Transport) -> int:
            lost = 0
            for _ in range(200):
                try:
                    await transport.post(url, b"{}", timeout_s=5)
                except GymConnectionLost:
                    lost += 1
            return lost

        assert using(make, use) <= 50


@both
def test_a_connection_is_not_used_again_after_a_while(
    make: Any, loopback: Any, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (aiohttp_transport, httpx_transport):
        monkeypatch.setattr(module, "KEEPALIVE_S", 0.2)

    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer())

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            for pause_s in (0, 0, 0.4, 0, 0):
                await asyncio.sleep(pause_s)
                await transport.post(server.url, b"{}", timeout_s=5)
            assert [request.connection for request in server.requests] == [0, 0, 1, 1, 1]

    using(make, use)


def test_connections_are_given_up_before_usual_servers_do() -> None:
    assert KEEPALIVE_S <= 2.5, "uvicorn closes unused connections after 5 s"


@pytest.mark.faults
@both
def test_many_at_a_time_and_cancelled_ones_leave_no_socket(make: Any, loopback: Any, answer: Any) -> None:
    async def respond(request: Any, writer: Any) -> None:
        await asyncio.sleep(0 if request.path == "/fast" else 60)
        writer.write(answer(200, request.body))

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            slow = [
                asyncio.ensure_future(transport.post(f"{server.url}/slow", b"{}", timeout_s=60))
                for _ in range(50)
            ]
            bodies = [str(index).encode() for index in range(200)]
            got = await asyncio.gather(
                *(transport.post(f"{server.url}/fast", body, timeout_s=10) for body in bodies)
            )
            assert [one.body for one in got] == bodies
            for one in slow:
                one.cancel()
            assert {type(end) for end in await asyncio.gather(*slow, return_exceptions=True)} == {
                asyncio.CancelledError
            }
            await server.idles()
            assert (await transport.post(f"{server.url}/fast", b"again", timeout_s=5)).body == b"again"
            await transport.aclose()
            await server.idles(open=0)

    using(make, use)


@both
def test_closing_ends_what_runs(make: Any, loopback: Any) -> None:
    async def respond(request: Any, writer: Any) -> None:
        await asyncio.sleep(60)

    async def use(transport: Transport) -> None:
        async with loopback(respond) as server:
            running: Coroutine[Any, Any, Any] = transport.post(server.url, b"{}", timeout_s=30)
            task = asyncio.ensure_future(running)
            while not server.running:
                await asyncio.sleep(0.01)
            await transport.aclose()
            with pytest.raises(GymConnectionLost):
                await asyncio.wait_for(task, 5)

    using(make, use)
