"""HTTP servers on the loopback that do exactly what a test says, well or badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Received:
    """One request as it came; ``connection`` counts connections from 0."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Respond = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def http(status: int = 200, body: bytes | Any = b"{}", *headers: str) -> bytes:
    """A whole answer; what is not bytes is written as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status} X",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


@dataclass
class Loopback:
    """A server whose every answer is what ``respond`` writes. A closed writer ends its connection.

    Attributes:
        requests: all that came.
        running: requests that ``respond`` is busy with; ``peak`` the most at the same time.
        open: connections that exist; ``connections`` how many ever did.
    """

    respond: Respond
    requests: list[Received] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    open: int = 0
    connections: int = 0
    url: str = ""

    async def __aenter__(self) -> Loopback:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def idles(self, *, open: int | None = None) -> None:
        """Wait until no request runs and, if given, so many connections are open."""
        for _ in range(1000):
            if not self.running and open in (None, self.open):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.running} requests run on {self.open} connections")

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer, self.connections))
        self.connections += 1
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> None:
        self.open += 1
        try:
            while not writer.is_closing():
                request = await _read_request(reader, connection)
                self.requests.append(request)
                self.running += 1
                self.peak = max(self.peak, self.running)
                answering = asyncio.ensure_future(self.respond(request, writer))
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not answering.done():
                        return
                    answering.result()
                finally:
                    self.running -= 1
                    answering.cancel()
                    gone.cancel()
                    await asyncio.gather(answering, gone, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, body, connection)


@pytest.fixture
def loopback() -> Callable[[Respond], Loopback]:
    """Makes a server: ``async with loopback(respond) as server``."""
    return Loopback


@pytest.fixture
def answer() -> Callable[..., bytes]:
    """Writes an HTTP answer: ``answer(status, body, *header_lines)``."""
    return http
