"""GET requests to many local servers at the same time, with one deadline that nothing stretches.

Health checks must work in any thread, beside any event loop and against servers that hang, drip or lie, so
this is a select loop over plain sockets instead of an HTTP library.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from .resolving import addresses_of

_LARGEST_ANSWER = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Probe:
    """What became of one request.

    Attributes:
        status: HTTP status, 0 if there was no whole answer.
        body: content of the answer.
        problem: why there was none, empty otherwise.
    """

    status: int
    body: bytes
    problem: str

    @property
    def complaint(self) -> str:
        """Why this is no 200: no whole answer, or another status."""
        return self.problem or f"answers with status {self.status}"


def get_all(urls: Iterable[str], *, timeout_s: float) -> Mapping[str, Probe]:
    """GET every URL once, all at the same time; returns after at most ``timeout_s`` seconds.

    Args:
        urls: plain ``http://host[:port]/path``.
        timeout_s: for everything, the names of hosts included.

    Raises:
        OSError: this process can open no more sockets.
    """
    deadline = time.monotonic() + timeout_s
    results: dict[str, Probe] = {}
    with selectors.DefaultSelector() as selector:
        open_requests: dict[str, _Request] = {}
        try:
            hosts = {url: urlsplit(url).hostname or "127.0.0.1" for url in urls}
            addresses = addresses_of(hosts.values(), deadline)
            for url, host in hosts.items():
                address = addresses[host]
                if isinstance(address, OSError):
                    results[url] = Probe(0, b"", f"cannot be reached: {address}")
                    continue
                request = _Request(url, address)
                problem = request.connect()
                if problem:
                    results[url] = Probe(0, b"", problem)
                    request.socket.close()
                else:
                    open_requests[url] = request
                    selector.register(request.socket, selectors.EVENT_WRITE, request)
            while open_requests:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                for key, _ in selector.select(left):
                    request = key.data
                    result = request.advance()
                    if result is not None:
                        selector.unregister(request.socket)
                        request.socket.close()
                        results[request.url] = result
                        del open_requests[request.url]
                    elif request.sent:
                        selector.modify(request.socket, selectors.EVENT_READ, request)
        finally:
            for request in open_requests.values():
                request.socket.close()
        for url, request in open_requests.items():
            state = "answered only in part" if request.received else "did not answer"
            results[url] = Probe(0, b"", f"{state} within {timeout_s:g} s")
    return results


class _Request:
    def __init__(self, url: str, address: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self._address = (address, parts.port or 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._outgoing = f"GET {path} HTTP/1.0\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
        self.socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.received = b""

    @property
    def sent(self) -> bool:
        return not self._outgoing

    def connect(self) -> str:
        try:
            number = self.socket.connect_ex(self._address)
        except OSError as error:
            return f"cannot be reached: {error}"
        return (
            ""
            if number in (0, errno.EINPROGRESS)
            else f"cannot be reached: {errno.errorcode.get(number, number)}"
        )

    def advance(self) -> Probe | None:
        """Go on as far as possible without waiting; returns the result once there is one."""
        try:
            if self._outgoing:
                number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    raise OSError(number, errno.errorcode.get(number, str(number)))
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
                return None
            chunk = self.socket.recv(65536)
        except BlockingIOError:
            return None
        except ConnectionRefusedError:
            return Probe(0, b"", "refuses connections")
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                return Probe(0, b"", "refuses connections")
            return Probe(0, b"", f"closed the connection: {error.strerror}")
        self.received += chunk
        if len(self.received) > _LARGEST_ANSWER:
            return Probe(0, b"", f"sent more than {_LARGEST_ANSWER} bytes")
        return _parsed(self.received, ended=not chunk)


def _parsed(received: bytes, *, ended: bool) -> Probe | None:
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        return Probe(0, b"", "closed the connection without an answer") if ended else None
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return Probe(0, b"", "does not speak HTTP")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)
    }
    length = headers.get(b"content-length", b"")
    if length.isdigit():
        if len(body) >= int(length):
            return Probe(int(words[1]), body[: int(length)], "")
        return Probe(0, b"", "closed the connection within its answer") if ended else None
    return Probe(int(words[1]), body, "") if ended else None
