"""An address that exists before the engine does.

The socket is bound and answers at once: with a typed 503 until an application is attached, and again while
the application is shut, for instance because its weights are old.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from ..failures import GenerationError, NotReadyError
from .asgi import App
from .gate import Gate
from .listening import Listener, bind
from .security import check_bearer, is_loopback, is_wildcard

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where to listen.

    Attributes:
        host: address to bind; anything but loopback needs ``token``.
        port: 0 is any free one.
        port_range: first and last port to try in turn, instead of ``port``; a firewall may want it.
        token: what requests have to carry as bearer token, printable ASCII; ``None`` is none. It is in no
            text of this object.
        advertised_host: name that URLs carry, needed where ``host`` stands for all addresses.

    Raises:
        ValueError: an address beyond loopback without a token, a token that no header can carry, or ports
            that are none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    port_range: tuple[int, int] | None = None
    token: str | None = field(default=None, repr=False)
    advertised_host: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None:
            check_bearer(self.token)
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
        self._listener: Listener | None = Listener(self._gate, self._socket)
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            self._listener.start_thread()
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

    @property
    def in_flight(self) -> int:
        """How many requests the application is working on."""
        return self._gate.in_flight

    def attach(self, app: App) -> None:
        """Let ``app`` answer from now on, in the reservation's own thread."""
        self._gate.open(app)

    async def attach_here(self, app: App, timeout_s: float = 10.0) -> None:
        """Let ``app`` answer from now on, on the running event loop: that of the engine which it calls.

        The socket stays open on the way, so that nobody is turned away.

        Raises:
            InfraError: the server did not start.
        """
        here = asyncio.get_running_loop()
        if self._loop is not here:
            await self._stop_listening(timeout_s)
            self._listener = Listener(self._gate, self._socket)
            await self._listener.start_here()
            self._loop = here
        self._gate.open(app)

    async def detach(self, reason: GenerationError, timeout_s: float = 10.0) -> None:
        """Answer everything with ``reason`` from a thread again, because the application's event loop ends.

        May be awaited on any event loop.

        Raises:
            InfraError: the server did not start.
        """
        self._gate.shut(reason)
        if self._loop is not None:
            await self._stop_listening(timeout_s)
            self._listener = listener = Listener(self._gate, self._socket)
            await asyncio.to_thread(listener.start_thread)

    def shut(self, reason: GenerationError) -> None:
        """Answer everything with ``reason``, what is in flight too, until :meth:`reopen`.

        May be called from any thread.
        """
        self._gate.shut(reason)

    def reopen(self) -> None:
        """Undo :meth:`shut`."""
        self._gate.reopen()

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """Stop serving and give the address back, within ``timeout_s``; idempotent, on any event loop."""
        await self._stop_listening(timeout_s)
        self._socket.close()

    def close(self, timeout_s: float = 10.0) -> None:
        """As :meth:`aclose`, for a reservation that is not on an event loop.

        Raises:
            RuntimeError: it is.
        """
        if self._loop is not None:
            raise RuntimeError("this server runs on an event loop; await aclose() instead")
        listener, self._listener = self._listener, None
        if listener is not None and not listener.stop_thread(timeout_s):
            self._warn(timeout_s)
        self._socket.close()

    async def _stop_listening(self, timeout_s: float) -> None:
        listener, self._listener = self._listener, None
        loop, self._loop = self._loop, None
        if listener is None:
            return
        if loop is None:
            ended = await asyncio.to_thread(listener.stop_thread, timeout_s)
        elif loop is asyncio.get_running_loop():
            ended = await listener.stop_here(timeout_s)
        elif loop.is_running():
            stopping = asyncio.run_coroutine_threadsafe(listener.stop_here(timeout_s), loop)
            done, _ = await asyncio.wait({asyncio.wrap_future(stopping)}, timeout=timeout_s + 2.0)
            ended = bool(done) and stopping.result()
        else:
            listener.abandon()
            ended = True
        if not ended:
            self._warn(timeout_s)

    def _warn(self, timeout_s: float) -> None:
        _LOG.warning("server: %s did not end within %g s", self.url, timeout_s)
