"""The HTTP side of the scripted model server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_LARGEST_BODY = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """What goes back: a status and a body, or nothing where the connection is cut.

    Attributes:
        status: HTTP status.
        body: the content, sent as JSON whatever it is.
        drop: close the connection instead.
    """

    status: int
    body: bytes
    drop: bool = False

    @classmethod
    def json(cls, document: Any, status: int = 200) -> Reply:
        """A JSON document."""
        return cls(status, json.dumps(document).encode("utf-8"))

    @classmethod
    def error(cls, status: int, message: str) -> Reply:
        """An error as vLLM writes it."""
        return cls.json({"object": "error", "message": message, "type": "Error", "code": status}, status)

    @classmethod
    def dropped(cls) -> Reply:
        """A connection that is closed without an answer."""
        return cls(0, b"", drop=True)


Answer = Callable[[str, str, Any], Reply]
"""From method, path and JSON body (``None`` where there is none) to the reply."""


class ModelHttpServer(ThreadingHTTPServer):
    """Serves ``answer`` on ``127.0.0.1`` from its construction until :meth:`close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, port: int, answer: Answer) -> None:
        self.answer = answer
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, name="scripted-model", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut the connections that are open."""
        self.shutdown()
        self._thread.join(timeout=5)
        self.server_close()
        with self._connections_lock:
            connections = tuple(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a word; everything else is answered by the handler."""

    def opened(self, connection: socket.socket) -> None:
        """Remember a connection."""
        with self._connections_lock:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._connections_lock:
            self._connections.discard(connection)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # Headers and body leave in one piece.
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self._owner.opened(self.connection)

    @property
    def _owner(self) -> ModelHttpServer:
        if not isinstance(self.server, ModelHttpServer):
            raise TypeError(f"this handler serves a ModelHttpServer, not {type(self.server).__name__}")
        return self.server

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self._owner.closed(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests print enough."""

    def do_GET(self) -> None:
        self._reply(self._owner.answer("GET", urlsplit(self.path).path, None))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LARGEST_BODY:
            self.close_connection = True
            return self._reply(Reply.error(411, "a body needs its length"))
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw) if raw else None
        except ValueError as error:
            return self._reply(Reply.error(400, f"the body is not JSON: {error}"))
        try:
            reply = self._owner.answer("POST", urlsplit(self.path).path, body)
        except Exception as error:
            # A fault of the script has to reach the test as an answer, not as a connection that hangs.
            reply = Reply.error(500, f"{type(error).__name__}: {error}")
        return self._reply(reply)

    def _reply(self, reply: Reply) -> None:
        if reply.drop:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)
        self.wfile.flush()
