"""A server for `bridge.py` that costs little: it answers every POST with the same JSON after a while.

    python tools/bench/bridge_server.py TOKENS

Prints its port. `POST /MILLISECONDS/run` answers after so long; `GET /peak` tells how many requests waited at
the same time at most since it was last asked.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def rollout_answer(tokens: int) -> bytes:
    """An answer as Gym's agents give it, with so many sampled tokens in two model calls."""
    rng = random.Random(0)
    calls: list[dict[str, object]] = [
        {
            "id": f"msg_{call}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "The answer is \\boxed{32}. " * 8, "annotations": []}
            ],
            "prompt_token_ids": [rng.randrange(150_000) for _ in range(tokens // 4)],
            "generation_token_ids": [rng.randrange(150_000) for _ in range(tokens // 2)],
            "generation_log_probs": [-rng.expovariate(1.0) for _ in range(tokens // 2)],
        }
        for call in range(2)
    ]
    answer = {
        "responses_create_params": {"input": [{"role": "user", "content": "How many? " * 20}]},
        "response": {"id": "resp_0", "object": "response", "output": calls, "usage": None},
        "reward": 1.0,
        "library_reward": 1.0,
        "judge_evaluations": None,
    }
    return json.dumps(answer).encode()


class Server:
    """What the connections share: the answer and who waits for it."""

    def __init__(self, tokens: int) -> None:
        body = rollout_answer(tokens)
        self.answer = HEAD % len(body) + body
        self.waiting = 0
        self.peak = 0

    def take_peak(self) -> bytes:
        body = str(self.peak).encode()
        self.peak = 0
        return HEAD % len(body) + body


class Connection(asyncio.Protocol):
    """One kept connection, a request at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
        )
        if len(body) < length:
            return
        self._received = b""
        if head.startswith(b"GET /peak"):
            self._transport.write(self._server.take_peak())
            return
        self._server.waiting += 1
        self._server.peak = max(self._server.peak, self._server.waiting)
        think_s = int(head.split(b"/", 2)[1]) / 1000
        asyncio.get_running_loop().call_later(think_s, self._answer)

    def _answer(self) -> None:
        self._server.waiting -= 1
        assert self._transport is not None
        self._transport.write(self._server.answer)


async def serve(tokens: int) -> None:
    """Serve on a free port of the loopback until killed."""
    server = Server(tokens)
    listening = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), "127.0.0.1", 0, backlog=65535
    )
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
