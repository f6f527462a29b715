"""A bound socket, and uvicorn on it: in a thread of its own or on the caller's event loop, ended in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from ..failures import InfraError
from .asgi import App

if TYPE_CHECKING:
    import uvicorn

_LOG = logging.getLogger(__name__)
_START_S = 30.0
_BACKLOG = 2048


def bind(host: str, ports: Sequence[int]) -> socket.socket:
    """A listening socket on the first of ``ports`` that is free; 0 is any.

    Raises:
        InfraError: none is; the cause of the last is kept.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failure: OSError | None = None
    for port in ports:
        candidate = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Lets a restarted server have its port back while old connections fade; no second listener fits.
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind((host, port))
            candidate.listen(_BACKLOG)
            candidate.setblocking(False)
        except OSError as error:
            candidate.close()
            failure = error
        else:
            return candidate
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]} ({len(ports)} ports)"
    raise InfraError(
        f"server: cannot listen on {host}, port {tried}: {failure}; free one or name others"
    ) from failure


class Listener:
    """Serves ``app`` on a duplicate of ``listening``, which itself stays open for whoever comes next.

    Args:
        app: gets every request.
        listening: a listening socket.
    """

    def __init__(self, app: App, listening: socket.socket) -> None:
        self._app = app
        self._listening = listening
        self._server: uvicorn.Server | None = None
        self._duplicates: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    def start_thread(self) -> None:
        """Serve from a thread of its own; returns when requests are accepted.

        Raises:
            InfraError: they are not within half a minute.
        """
        server, sockets = self._build()

        def serve() -> None:
            asyncio.run(server.serve(sockets))

        self._thread = threading.Thread(target=serve, name="rl-generation-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise InfraError(f"server: it did not start within {_START_S:g} s")
            time.sleep(0.002)

    async def start_here(self) -> None:
        """Serve on the running event loop; returns when requests are accepted.

        Raises:
            InfraError: they are not within half a minute.
        """
        server, sockets = self._build()
        self._task = asyncio.ensure_future(server.serve(sockets))
        deadline = time.monotonic() + _START_S
        while not server.started:
            if self._task.done() or time.monotonic() > deadline:
                failure = self._task.exception() if self._task.done() else None
                raise InfraError(f"server: it did not start: {failure}") from failure
            await asyncio.sleep(0.002)

    def stop_thread(self, timeout_s: float) -> bool:
        """End a server that :meth:`start_thread` started; idempotent.

        Returns:
            Whether it ended in time. Requests in flight may finish within half of it and are cut then.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._ask_to_end(timeout_s)
        thread.join(timeout_s)
        return not thread.is_alive()

    async def stop_here(self, timeout_s: float) -> bool:
        """End a server that :meth:`start_here` started; as :meth:`stop_thread`."""
        task, self._task = self._task, None
        if task is None:
            return True
        self._ask_to_end(timeout_s)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
        return bool(done)

    def abandon(self) -> None:
        """Let go of a server whose event loop has ended without it."""
        self._task = None
        for duplicate in self._duplicates:
            duplicate.close()

    def _ask_to_end(self, timeout_s: float) -> None:
        if self._server is not None:
            # uvicorn takes any number, although it declares whole ones.
            self._server.config.timeout_graceful_shutdown = timeout_s / 2  # pyrefly: ignore
            self._server.should_exit = True

    def _build(self) -> tuple[uvicorn.Server, list[socket.socket]]:
        # Here and not at the top: the extra is needed by whoever serves, not by whoever names the class.
        import uvicorn

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Generator[None, None, None]:
                # Signals are the application's business.
                yield

        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=120,
            ws="none",
        )
        self._server = Server(config)
        # uvicorn closes the sockets that it is given.
        self._duplicates = [self._listening.dup()]
        return self._server, self._duplicates
