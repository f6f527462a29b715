"""What stands before an application: who may come in, and whether anybody may now."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..failures import GenerationError
from .asgi import App, Message, Receive, Scope, Send, send_json
from .refusals import UnauthorizedError, refusal_of
from .security import check_token


@dataclass(slots=True, eq=False)
class _Flight:
    """A request that the application is working on."""

    loop: asyncio.AbstractEventLoop
    cut: asyncio.Event
    reason: GenerationError | None = None


class Gate:
    """Lets requests with the right token through to the application, if there is one and it is not shut.

    ``/health`` asks for no token. Its methods may be called from any thread.

    Args:
        token: what requests have to carry, ``None`` is nothing.
        reason: said as long as there is no application.
    """

    def __init__(self, token: str | None, reason: GenerationError) -> None:
        self._token = token
        self._reason: GenerationError | None = reason
        self._app: App | None = None
        self._flights: set[_Flight] = set()

    @property
    def in_flight(self) -> int:
        """How many requests the application is working on."""
        return len(self._flights)

    def open(self, app: App) -> None:
        """Let ``app`` answer."""
        self._app = app
        self._reason = None

    def shut(self, reason: GenerationError) -> None:
        """Answer with ``reason`` instead, what is in flight too: whoever sampled it may be no more."""
        self._reason = reason
        for flight in tuple(self._flights):
            flight.reason = reason
            flight.loop.call_soon_threadsafe(flight.cut.set)

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
            reason = await self._pass(self._app, scope, receive, send)
        if reason is not None:
            refusal = refusal_of(reason)
            # A client that asks again must not do so on a connection of a server that is about to hand over.
            headers = {**refusal.headers, "connection": "close"}
            await send_json(send, refusal.status, refusal.document, headers)

    async def _pass(self, app: App, scope: Scope, receive: Receive, send: Send) -> GenerationError | None:
        """Let the application answer; why it did not, where it was cut off before it began to."""
        flight = _Flight(asyncio.get_running_loop(), asyncio.Event())
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if begun or not flight.cut.is_set():
                begun = True
                await send(message)

        self._flights.add(flight)
        work = asyncio.ensure_future(app(scope, receive, watched))
        cut = asyncio.ensure_future(flight.cut.wait())
        try:
            await asyncio.wait({work, cut}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._flights.discard(flight)
            work.cancel()
            cut.cancel()
            await asyncio.gather(work, cut, return_exceptions=True)
        return None if begun else flight.reason
