"""HTTP with httpx: no further package needed, best for some hundred requests at a time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..failures import GymConnectionLost, GymError, GymTimeout, GymUnavailable
from .base import CONNECT_TIMEOUT_S, KEEPALIVE_S, MAX_ANSWER_BYTES, HttpAnswer
from .content import check_encoding, check_length, read_at_most
from .deadline import Deadline
from .exchange import Exchanging, said

if TYPE_CHECKING:
    import httpx


class HttpxTransport(Exchanging):
    """Posts through pools of httpx's own transport, the layer below its client, one request at a time each.

    That layer knows no cookies, no redirects, no environment and no repeats. httpx looks at every connection
    and every request of a pool before and after each request: in one pool it costs more the more there are.
    """

    def __init__(
        self, *, connect_timeout_s: float = CONNECT_TIMEOUT_S, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        import ssl

        self._connect_timeout_s = connect_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._pools: list[httpx.AsyncHTTPTransport] = []
        # By the server that they were last used for. The last one is used first: a light load needs few.
        self._unused: dict[str, list[httpx.AsyncHTTPTransport]] = {}
        self._urls: dict[str, httpx.URL] = {}
        # One for all: making one reads every certificate of the machine.
        self._tls = ssl.create_default_context()
        self._closed = False
        _settle_missing_sniffio()
        # Loading httpx takes up to a second, which must not fall into the first request's time.
        self._unused[""] = [self._new_pool()]

    async def aclose(self) -> None:
        """Close every connection; requests that run lose theirs."""
        self._closed = True
        self._unused.clear()
        while self._pools:
            await self._pools.pop().aclose()

    async def _exchange(
        self, method: str, url: str, body: bytes | None, *, timeout_s: float, headers: Mapping[str, str]
    ) -> HttpAnswer:
        import httpx

        if self._closed:
            raise GymUnavailable("the transport is closed", address=url)
        request = httpx.Request(
            method,
            self._parsed(url),
            headers={"Accept": "application/json", "Accept-Encoding": "identity", **headers},
            content=body,
            extensions={"timeout": {"connect": self._connect_timeout_s, "read": None, "write": None}},
        )
        deadline = Deadline(timeout_s)
        server = request.url.netloc.decode("ascii")
        pool = self._pool_for(server)
        try:
            with deadline:
                return await self._send(pool, request, url)
        except TimeoutError as error:
            raise GymTimeout(
                f"no whole answer within {timeout_s:g} s", address=url, elapsed_s=deadline.elapsed_s
            ) from error
        except httpx.UnsupportedProtocol as error:
            raise GymError(f"not a URL of HTTP ({error})", address=url) from error
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise GymUnavailable(
                f"no connection ({said(error)})", address=url, elapsed_s=deadline.elapsed_s
            ) from error
        except httpx.TransportError as error:
            raise GymConnectionLost(
                f"no whole answer ({said(error)})", address=url, elapsed_s=deadline.elapsed_s
            ) from error
        finally:
            self._unused.setdefault(server, []).append(pool)

    async def _send(
        self, transport: httpx.AsyncHTTPTransport, request: httpx.Request, url: str
    ) -> HttpAnswer:
        response = await transport.handle_async_request(request)
        try:
            most = self._max_answer_bytes
            check_encoding(response.headers.get("content-encoding", ""), url)
            check_length(response.headers.get("content-length"), most, url)
            content = await read_at_most(_stream_of(response), most, url)
        finally:
            await response.aclose()
        return HttpAnswer(response.status_code, content, retry_after=response.headers.get("retry-after", ""))

    def _parsed(self, url: str) -> httpx.URL:
        import httpx

        known = self._urls.get(url)
        if known is None:
            try:
                known = httpx.URL(url)
            except httpx.InvalidURL as error:
                raise GymError(f"not a URL ({error})", address=url) from error
            self._urls[url] = known
        return known

    def _pool_for(self, server: str) -> httpx.AsyncHTTPTransport:
        """An unused pool: with a connection to ``server``, else with one to another, else a new one."""
        unused = self._unused.get(server) or next(filter(None, self._unused.values()), None)
        return unused.pop() if unused else self._new_pool()

    def _new_pool(self) -> httpx.AsyncHTTPTransport:
        import httpx

        # No bound on connections: httpx loses count when a request is cancelled while its pool makes room,
        # and would then let later ones wait for ever. Beyond the one that may be kept, it closes unused ones.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)
        pool = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits, retries=0)
        self._pools.append(pool)
        return pool


def _settle_missing_sniffio() -> None:
    """Make the absence of ``sniffio`` cheap.

    httpcore tries to import it some ten times per request. While it is missing, each try searches every
    folder of ``sys.path``: that costs more than the request. The entry says what such a search would find.
    """
    if "sniffio" not in sys.modules and importlib.util.find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]


def _stream_of(response: httpx.Response) -> httpx.AsyncByteStream:
    import httpx

    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    return stream
