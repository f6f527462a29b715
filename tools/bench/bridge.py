"""CPU time per rollout of the bridge's client, and its requests per second, against bare aiohttp.

    python tools/bench/bridge.py [--depths 64,1000,4000,16000] [--clients NAME,…] [--tokens 400] [--json]

Every client posts the same rollouts to the same server, which runs in a process of its own and answers after
a while, so that as many requests as the depth says are under way at the same time (the server tells how many
were). The clients take turns. CPU time is that of this process: user and system, JSON and the tasks included.
The ratio is to bare aiohttp at the same depth in the same turn, its median over the turns.

    aiohttp      an aiohttp session and as many tasks as the depth
    httpx        an httpx client; what exceeds the depth waits in its pool
    via-httpx    rl_gym_bridge.client.GymClient with its httpx transport
    via-aiohttp  the same with its aiohttp transport

Exits with 1 when the transport that `auto` picks costs more than three times bare aiohttp at any depth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import httpx

from rl_gym_bridge.client import Answer, GymClient
from rl_gym_bridge.requests import RolloutRequest
from rl_gym_bridge.transport.aiohttp_transport import AiohttpTransport
from rl_gym_bridge.transport.choice import choose_transport

TARGET = 3.0
#: Requests per client and turn, in multiples of the depth, and at least.
ROUNDS, LEAST_REQUESTS = 2, 2000
#: A plain httpx client's pool takes minutes above this depth, and for more requests than this (or the depth).
PLAIN_HTTPX_DEPTH, PLAIN_HTTPX_REQUESTS = 1000, 256
BODY: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Determine how many 1000 digit numbers there are. " * 12}],
        "temperature": 1.0,
        "top_p": 1.0,
        "max_output_tokens": 4096,
    },
    "question": "Determine how many 1000 digit numbers there are. " * 12,
    "expected_answer": "32",
}


@dataclass(frozen=True)
class Measurement:
    """One client at one depth in one turn.

    Attributes:
        cpu_us: client CPU per request, microseconds.
        per_second: requests per second of wall time, the server's thinking included.
        peak: requests at the server at the same time, at most.
    """

    client: str
    depth: int
    turn: int
    requests: int
    cpu_us: float
    per_second: float
    peak: int


async def bare_aiohttp(url: str, depth: int, requests: int) -> None:
    left = iter(range(requests))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def work() -> None:
            for _ in left:
                async with session.post(f"{url}/run", json=BODY) as response:
                    assert (await response.json())["reward"] == 1.0

        await asyncio.gather(*(work() for _ in range(depth)))


async def plain_httpx(url: str, depth: int, requests: int) -> None:
    limits = httpx.Limits(max_connections=depth, max_keepalive_connections=depth)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def one() -> None:
            assert (await client.post(f"{url}/run", json=BODY)).json()["reward"] == 1.0

        await asyncio.gather(*(one() for _ in range(requests)))


def bridge(name: Literal["httpx", "aiohttp"]) -> Callable[[str, int, int], Awaitable[None]]:
    """The bridge's client with that transport."""

    async def run(url: str, depth: int, requests: int) -> None:
        transport = choose_transport(name, max_concurrency=depth)
        async with GymClient({"agent": url}, transport=transport, max_concurrency=depth) as client:
            assert client.max_concurrency == depth, "the limit on open files is too low"
            rollouts = (RolloutRequest(f"r{i}", "g", "row", "agent", BODY) for i in range(requests))
            answered = 0
            async for _, answer in client.stream(rollouts):
                assert isinstance(answer, Answer), answer
                assert answer.value["reward"] == 1.0
                answered += 1
            assert answered == requests

    return run


CLIENTS: dict[str, Callable[[str, int, int], Awaitable[None]]] = {
    "aiohttp": bare_aiohttp,
    "via-aiohttp": bridge("aiohttp"),
    "via-httpx": bridge("httpx"),
    "httpx": plain_httpx,
}


@contextlib.contextmanager
def server(tokens: int) -> Generator[str]:
    """A server in a process of its own; its base URL."""
    script = Path(__file__).with_name("bridge_server.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(tokens)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def measure(client: str, base: str, depth: int, think_ms: int, turn: int) -> Measurement:
    """Run one client once."""
    requests = max(ROUNDS * depth, LEAST_REQUESTS)
    if client == "httpx":
        requests = max(depth, PLAIN_HTTPX_REQUESTS)
    peak(base)
    gc.collect()
    cpu, wall = time.process_time(), time.monotonic()
    asyncio.run(_awaited(CLIENTS[client](f"{base}/{think_ms}", depth, requests)))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    measured = Measurement(client, depth, turn, requests, cpu / requests * 1e6, requests / wall, peak(base))
    print(f"{client} at {depth}: {measured.cpu_us:.0f} us in {wall:.1f} s", file=sys.stderr)
    return measured


async def _awaited(work: Awaitable[None]) -> None:
    await work


def peak(base: str) -> int:
    """Requests at the server at the same time, at most, since this was last called."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        f"{base}/peak", timeout=60
    ) as answer:
        return int(answer.read())


def auto_at(depth: int) -> str:
    """Name of the client that a run of that depth gets."""
    chosen = choose_transport("auto", max_concurrency=depth)
    return "via-aiohttp" if isinstance(chosen, AiohttpTransport) else "via-httpx"


def report(measured: list[Measurement], depths: list[int]) -> list[dict[str, Any]]:
    """One row per depth and client: medians, and the medians of the ratios to bare aiohttp."""
    rows: list[dict[str, Any]] = []
    for depth in depths:
        base = {one.turn: one for one in measured if one.depth == depth and one.client == "aiohttp"}
        for client in dict.fromkeys(one.client for one in measured if one.depth == depth):
            ones = [one for one in measured if one.depth == depth and one.client == client]
            ratios = [one.cpu_us / base[one.turn].cpu_us for one in ones]
            rates = [one.per_second / base[one.turn].per_second for one in ones]
            rows.append(
                {
                    "depth": depth,
                    "client": client,
                    "auto": client == auto_at(depth),
                    "turns": len(ones),
                    "requests": ones[0].requests,
                    "peak": min(one.peak for one in ones),
                    "cpu_us": statistics.median(one.cpu_us for one in ones),
                    "cpu_ratio": statistics.median(ratios),
                    "per_second": statistics.median(one.per_second for one in ones),
                    "rate_ratio": statistics.median(rates),
                }
            )
    return rows


def main() -> int:
    """Print the table; return 1 when the target is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--depths", default="64,1000,4000,16000")
    parser.add_argument("--clients", default=",".join(CLIENTS))
    parser.add_argument(
        "--tokens", type=int, default=400, help="sampled tokens of an answer (400 is about 14 kB)"
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="of each client, at depths up to 1,000; fewer above"
    )
    parser.add_argument(
        "--think-ms-per-request", type=float, default=0.6, help="times the depth: the server's pause"
    )
    parser.add_argument("--json", action="store_true", help="every measurement instead of the table")
    options = parser.parse_args()
    depths = [int(depth) for depth in options.depths.split(",")]
    clients = list(dict.fromkeys(["aiohttp", *options.clients.split(",")]))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measured: list[Measurement] = []
    with server(options.tokens) as base:
        for client in clients:
            measure(client, base, 64, 1, 0)
        for depth in depths:
            think_ms = max(1, int(options.think_ms_per_request * depth))
            for turn in range(max(1, min(options.turns, options.turns * 1000 // depth))):
                for client in clients:
                    if client != "httpx" or (depth <= PLAIN_HTTPX_DEPTH and turn == 0):
                        measured.append(measure(client, base, depth, think_ms, turn))
    rows = report(measured, depths)
    if options.json:
        print(json.dumps({"rows": rows, "measured": [asdict(one) for one in measured]}, indent=1))
    else:
        print(
            f"python {platform.python_version()}, aiohttp {aiohttp.__version__}, httpx {httpx.__version__}, "
            f"answers with {options.tokens} tokens"
        )
        print(
            f"{'depth':>6} {'client':12} {'turns':>5} {'requests':>8} {'peak':>6} {'CPU us':>8} {'ratio':>6} "
            f"{'req/s':>7} {'ratio':>6}"
        )
        for row in rows:
            print(
                f"{row['depth']:6} {row['client'] + ('*' if row['auto'] else ''):12} {row['turns']:5} "
                f"{row['requests']:8} {row['peak']:6} {row['cpu_us']:8.0f} {row['cpu_ratio']:6.2f} "
                f"{row['per_second']:7.0f} {row['rate_ratio']:6.2f}"
            )
        print("* what transport: auto picks at that depth")
    return int(any(row["auto"] and row["cpu_ratio"] > TARGET for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
