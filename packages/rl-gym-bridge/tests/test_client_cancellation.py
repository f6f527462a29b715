"""Rollouts that are ended while something below them swallows the cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

from rl_gym_bridge.client import GymClient
from rl_gym_bridge.failures import GymStopped
from rl_gym_bridge.requests import RolloutRequest
from rl_gym_bridge.transport.base import HttpAnswer

REQUESTS = [RolloutRequest(f"r{n}", "g", "row", "agent", {}) for n in range(3)]


class Deaf:
    """Takes the first cancellation for something else, as a timeout may that passes in the same moment."""

    def __init__(self) -> None:
        self.swallowed = self.ended = 0

    async def post(
        self, url: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
            self.swallowed += 1
            await asyncio.sleep(30)
        finally:
            self.ended += 1
        raise AssertionError

    async def get(self, url: str, *, timeout_s: float) -> HttpAnswer:
        raise AssertionError

    async def aclose(self) -> None:
        pass


def test_a_stop_ends_what_swallows_a_cancellation() -> None:
    async def stopped(transport: Deaf) -> list[object]:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop.set)
        client = GymClient({"agent": "http://127.0.0.1:1"}, transport=transport)
        return [answer async for _, answer in client.stream(REQUESTS, stop=stop)]

    transport, began = Deaf(), time.monotonic()
    answers = asyncio.run(stopped(transport))
    assert time.monotonic() - began < 10
    assert [type(answer) for answer in answers] == [GymStopped] * 3
    assert (transport.swallowed, transport.ended) == (3, 3)


def test_closing_the_stream_ends_what_swallows_a_cancellation() -> None:
    async def closed(transport: Deaf) -> None:
        client = GymClient({"agent": "http://127.0.0.1:1"}, transport=transport)
        async with contextlib.aclosing(client.stream(REQUESTS)) as answers:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(anext(answers), 0.2)

    transport, began = Deaf(), time.monotonic()
    asyncio.run(closed(transport))
    assert time.monotonic() - began < 10
    assert (transport.swallowed, transport.ended) == (3, 3)
