"""An address that exists before the engine does.

The socket is bound and answers at once: with a typed 503 until an application is attached, and again while
the application is shut, for instance because its weights are old.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from ..failures import GenerationError, NotReadyError
from .asgi import App, Receive, Scope, Send, send_json
from .listening import Listener, bind
from .refusals import UnauthorizedError, refusal_of
from .security import check_token, is_loopback, is_wildcard

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where to listen.

    Attributes:
        host: address to bind; anything but loopback needs ``token``.
        port: 0 is any free one.
        port_range: first and last port to try in turn, instead of ``port``; a firewall may want it.
        token: what requests have to carry as bearer token; ``None`` is none. It is in no text of this object.
        advertised_host: name that URLs carry, needed where ``host`` stands for all addresses.

    Raises:
        ValueError: an address beyond loopback without a token, or ports that are none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    port_range: tuple[int, int] | None = None
    token: str | None = field(default=None, repr=False)
    advertised_host: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not self.token.strip():
            raise ValueError("the server's token is empty; give one or none")
        if not is_loopback(self.host) and self.token is None:
            raise ValueError(
                f"the server would listen on {self.host}, which others reach, without a token; set token or "
                "listen on 127.0.0.1"
            )
        if is_wildcard(self.host) and not self.advertised_host:
            raise ValueError(
                f"the server would listen on {self.host!r}, all addresses, so its URL needs advertised_host"
            )
        first, last = self.port_range or (self.port, self.port)
        if not 0 <= first <= last <= 65535 or (self.port_range and first == 0):
            raise ValueError(f"ports from {first} to {last} are none")

    def ports(self, preferred: int = 0) -> list[int]:
        """Ports to try in turn, ``preferred`` first unless it is 0."""
        first, last = self.port_range or (self.port, self.port)
        ports = list(range(first, last + 1))
        return [preferred, *(port for port in ports if port != preferred)] if preferred else ports


class Reservation:
    """A bound address and what answers there. Bound when it is made; call :meth:`close` in the end.

    Args:
        settings: where.
        preferred_port: taken if it is free, so that a restarted server has its old address.

    Raises:
        InfraError: no port is free.
    """

    def __init__(self, settings: ListenSettings, preferred_port: int = 0) -> None:
        self._settings = settings
        self._socket = bind(settings.host, settings.ports(preferred_port))
        self._port: int = self._socket.getsockname()[1]
        self._gate = Gate(settings.token, NotReadyError(f"server: {self.url} is reserved; its engine loads"))
        self._listener: Listener | None = None
        self._on_loop = False
        try:
            self._listen_in_thread()
        except BaseException:
            self._socket.close()
            raise

    @property
    def port(self) -> int:
        """The port that is bound."""
        return self._port

    @property
    def url(self) -> str:
        """``http://HOST:PORT``."""
        host = self._settings.advertised_host or self._settings.host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def base_url(self) -> str:
        """The OpenAI base URL, ending in ``/v1``."""
        return f"{self.url}/v1"

    def attach(self, app: App) -> None:
        """Let ``app`` answer from now on, in the reservation's own thread."""
        self._gate.open(app)

    async def attach_here(self, app: App, timeout_s: float = 10.0) -> None:
        """Let ``app`` answer from now on, on the running event loop: that of the engine which it calls.

        The socket stays open on the way, so that nobody is turned away.

        Raises:
            InfraError: the server did not start.
        """
        if not self._on_loop:
            listener, self._listener = self._listener, None
            if listener is not None and not await asyncio.to_thread(listener.stop_thread, timeout_s):
                _LOG.warning("server: the thread of %s did not end within %g s", self.url, timeout_s)
            self._listener = Listener(self._gate, self._socket)
            await self._listener.start_here()
            self._on_loop = True
        self._gate.open(app)

    def shut(self, reason: GenerationError) -> None:
        """Answer everything with ``reason`` until :meth:`reopen` or another application."""
        self._gate.shut(reason)

    def reopen(self) -> None:
        """Undo :meth:`shut`."""
        self._gate.reopen()

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """Stop serving and give the address back, within ``timeout_s``; idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None and self._on_loop:
            ended = await listener.stop_here(timeout_s)
        elif listener is not None:
            ended = await asyncio.to_thread(listener.stop_thread, timeout_s)
        else:
            ended = True
        self._end(ended, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """As :meth:`aclose`, for a reservation that was never moved to an event loop.

        Raises:
            RuntimeError: it was.
        """
        if self._on_loop and self._listener is not None:
            raise RuntimeError("this server runs on an event loop; await aclose() there")
        listener, self._listener = self._listener, None
        self._end(listener is None or listener.stop_thread(timeout_s), timeout_s)

    def _end(self, ended: bool, timeout_s: float) -> None:
        if not ended:
            _LOG.warning("server: %s did not end within %g s", self.url, timeout_s)
        self._socket.close()

    def _listen_in_thread(self) -> None:
        self._listener = Listener(self._gate, self._socket)
        self._listener.start_thread()


class Gate:
    """Lets requests with the right token through to the application, if there is one and it is not shut.

    ``/health`` asks for no token.

    Args:
        token: what requests have to carry, ``None`` is nothing.
        reason: said as long as there is no application.
    """

    def __init__(self, token: str | None, reason: GenerationError) -> None:
        self._token = token
        self._reason: GenerationError | None = reason
        self._app: App | None = None

    def open(self, app: App) -> None:
        """Let ``app`` answer."""
        self._app = app
        self._reason = None

    def shut(self, reason: GenerationError) -> None:
        """Answer with ``reason`` instead."""
        self._reason = reason

    def reopen(self) -> None:
        """Let the application answer again.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._app is None:
            raise RuntimeError("no application is attached yet")
        self._reason = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Anything but HTTP is ignored."""
        if scope["type"] != "http":
            return
        reason = self._reason
        try:
            if scope["path"] != "/health":
                check_token(scope, self._token)
        except UnauthorizedError as error:
            reason = error
        if reason is None and self._app is not None:
            await self._app(scope, receive, send)
        elif reason is not None:
            refusal = refusal_of(reason)
            # A client that asks again must not do so on a connection of a server that is about to hand over.
            headers = {**refusal.headers, "connection": "close"}
            await send_json(send, refusal.status, refusal.document, headers)
