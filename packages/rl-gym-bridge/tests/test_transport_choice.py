"""Which HTTP library a run gets, with and without aiohttp."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any, cast

import pytest

from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.transport.aiohttp_transport import AiohttpTransport
from rl_gym_bridge.transport.choice import HTTPX_DEPTH, choose_transport
from rl_gym_bridge.transport.httpx_transport import HttpxTransport


def test_auto_takes_aiohttp_for_many_at_a_time() -> None:
    assert isinstance(choose_transport("auto", max_concurrency=HTTPX_DEPTH + 1), AiohttpTransport)
    assert isinstance(choose_transport("auto", max_concurrency=HTTPX_DEPTH), HttpxTransport)
    assert isinstance(choose_transport("httpx", max_concurrency=10**5), HttpxTransport)
    assert isinstance(choose_transport("aiohttp", max_concurrency=1), AiohttpTransport)


def test_without_aiohttp_auto_takes_httpx_and_asking_for_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cast("dict[str, Any]", sys.modules), "aiohttp", None)
    assert isinstance(choose_transport("auto", max_concurrency=10**5), HttpxTransport)
    with pytest.raises(GymConfigError, match=r"rl-gym-bridge\[aiohttp\]") as caught:
        choose_transport("aiohttp", max_concurrency=1)
    assert caught.value.component == "transport"


def test_a_transport_that_is_none_is_refused() -> None:
    with pytest.raises(GymConfigError, match="auto, httpx or aiohttp"):
        choose_transport(cast("Any", "requests"), max_concurrency=1)


def test_only_what_is_chosen_is_loaded() -> None:
    code = (
        "import sys\n"
        "from rl_gym_bridge.transport.choice import choose_transport\n"
        "print(sorted({'httpx', 'aiohttp', 'asyncio'} & set(sys.modules)))\n"
        "choose_transport('auto', max_concurrency=1)\n"
        "print(sorted({'httpx', 'aiohttp'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[]", "['httpx']"]


def test_the_search_for_a_missing_sniffio_is_made_once(
    loopback: Any, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []

    class Watch:
        def find_spec(self, name: str, *_: object) -> None:
            searched.append(name)

    modules = cast("dict[str, Any]", sys.modules)
    monkeypatch.delitem(modules, "sniffio", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])

    async def respond(request: Any, writer: Any) -> None:
        writer.write(answer())

    async def main() -> None:
        transport = HttpxTransport()
        async with loopback(respond) as server:
            for _ in range(10):
                await transport.post(server.url, b"{}", timeout_s=5)
        await transport.aclose()

    asyncio.run(main())
    assert searched.count("sniffio") <= 1
