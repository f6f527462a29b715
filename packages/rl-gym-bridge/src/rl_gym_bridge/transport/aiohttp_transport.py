"""HTTP with aiohttp: the cheaper one for thousands of requests at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..failures import GymAnswerError, GymConnectionLost, GymError, GymTimeout, GymUnavailable
from .base import CONNECT_TIMEOUT_S, KEEPALIVE_S, MAX_ANSWER_BYTES, HttpAnswer
from .content import check_encoding, check_length, read_at_most
from .deadline import Deadline
from .exchange import Exchanging, said

if TYPE_CHECKING:
    import aiohttp


class AiohttpTransport(Exchanging):
    """Posts through one session of aiohttp. Needs the extra ``rl-gym-bridge[aiohttp]``.

    aiohttp sends a request again by itself when a kept connection breaks, but only of a method that may be
    repeated: never a POST.

    Raises:
        ImportError: aiohttp is not installed.
    """

    def __init__(
        self, *, connect_timeout_s: float = CONNECT_TIMEOUT_S, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        # Loading it takes up to a second, which must not fall into the first request's time.
        import aiohttp  # noqa: F401

        self._connect_timeout_s = connect_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def aclose(self) -> None:
        """Close every connection; requests that run lose theirs."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _exchange(
        self, method: str, url: str, body: bytes | None, *, timeout_s: float, headers: Mapping[str, str]
    ) -> HttpAnswer:
        import asyncio

        import aiohttp

        if self._closed:
            raise GymUnavailable("the transport is closed", address=url)
        session = self._session = self._session or self._new_session()
        deadline = Deadline(timeout_s)
        try:
            with deadline:
                # In this turn the loop learns which unused connections their servers have closed.
                await asyncio.sleep(0)
                return await self._send(session, method, url, body, headers)
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise GymError(f"not a URL ({error})", address=url) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise GymUnavailable(
                f"no connection ({said(error)})", address=url, elapsed_s=deadline.elapsed_s
            ) from error
        except TimeoutError as error:
            raise GymTimeout(
                f"no whole answer within {timeout_s:g} s", address=url, elapsed_s=deadline.elapsed_s
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise GymConnectionLost(
                f"no whole answer ({said(error)})", address=url, elapsed_s=deadline.elapsed_s
            ) from error

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> HttpAnswer:
        async with session.request(
            method, url, data=body, headers=headers, allow_redirects=False
        ) as response:
            most = self._max_answer_bytes
            announced = response.headers.get("Content-Length")
            check_encoding(response.headers.get("Content-Encoding", ""), url)
            check_length(announced, most, url)
            if announced is not None:
                content = await response.read()
            else:
                try:
                    content = await read_at_most(response.content.iter_any(), most, url)
                except GymAnswerError:
                    response.close()
                    raise
            return HttpAnswer(response.status, content, retry_after=response.headers.get("Retry-After", ""))

    def _new_session(self) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            # No bound here: how many run at a time is decided before.
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_S, resolver=aiohttp.ThreadedResolver()
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        )
