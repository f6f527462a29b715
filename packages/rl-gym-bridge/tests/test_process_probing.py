"""Requests to many servers at once, within one deadline whatever the servers do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.supervision.attached import AttachedGym
from rl_gym_bridge.supervision.probing import get_all

Serve = Callable[[Callable[[socket.socket], None]], str]
# Set at a test's end, when servers that would go on for longer give up.
ENDED = threading.Event()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Runs a server that treats each connection as told; returns its address."""
    listening: list[socket.socket] = []
    ENDED.clear()

    def start(treat: Callable[[socket.socket], None]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        treat(connection)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}/"

    yield start
    ENDED.set()
    for server in listening:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _answer(text: bytes) -> Callable[[socket.socket], None]:
    def treat(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(text)

    return treat


def test_status_and_body(serve: Serve) -> None:
    good = serve(_answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more"))
    bad = serve(_answer(b"HTTP/1.1 503 No\r\n\r\nlater"))
    probes = get_all([good, bad, good], timeout_s=5)
    assert (probes[good].status, probes[good].body, probes[good].problem) == (200, b"ok", "")
    assert (probes[bad].status, probes[bad].body) == (503, b"later")


@pytest.mark.faults
def test_many_hanging_servers_cost_one_deadline_together(serve: Serve) -> None:
    def hang(connection: socket.socket) -> None:
        ENDED.wait(60)

    urls = [serve(hang) for _ in range(20)]
    began = time.monotonic()
    probes = get_all(urls, timeout_s=0.4)
    # One after the other they would cost 8 s.
    assert time.monotonic() - began < 6
    assert {probe.problem for probe in probes.values()} == {"did not answer within 0.4 s"}
    assert len(probes) == 20


@pytest.mark.faults
def test_a_server_that_drips_does_not_stretch_the_deadline(serve: Serve) -> None:
    def drip(connection: socket.socket) -> None:
        connection.recv(4096)
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + b"x" * 999:
            connection.sendall(bytes([byte]))
            if ENDED.wait(0.05):
                return

    url = serve(drip)
    began = time.monotonic()
    probe = get_all([url], timeout_s=0.8)[url]
    # All of it would take 50 s.
    assert time.monotonic() - began < 10
    assert probe.problem == "answered only in part within 0.8 s"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\n", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "closed the connection within its answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 twenty OK\r\n\r\n", "does not speak HTTP"),
    ],
)
def test_what_is_no_answer(serve: Serve, text: bytes, problem: str) -> None:
    url = serve(_answer(text))
    assert get_all([url], timeout_s=5)[url].problem == problem


def test_a_closed_port_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    assert get_all([url], timeout_s=60)[url].problem == "refuses connections"
    assert time.monotonic() - began < 10


def test_names_are_resolved_within_the_deadline(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve(_answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
    named = url.replace("127.0.0.1", "gym.example")
    other, lost, hung = "http://other.example:9/", "http://lost.example:9/", "http://hung.example:9/"
    released = threading.Event()

    def resolve(host: str, *_: object, **__: object) -> list:
        if host == "hung.example":
            released.wait(60)
        if host != "gym.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
        return [six, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        probes = get_all([named, other, lost], timeout_s=5)
        assert (probes[named].status, probes[named].body) == (200, b"ok")
        assert (
            probes[lost].problem
            == "cannot be reached: its name cannot be resolved: Name or service not known"
        )
        began = time.monotonic()
        probe = get_all([hung], timeout_s=0.3)[hung]
        assert time.monotonic() - began < 10
        assert probe.problem == "cannot be reached: its name was not resolved in time"
    finally:
        released.set()


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "https://gym.example"])
def test_a_gym_behind_tls_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(GymConfigError, match="plain HTTP"):
        AttachedGym(url)


def test_nothing_to_ask() -> None:
    assert get_all([], timeout_s=5) == {}
