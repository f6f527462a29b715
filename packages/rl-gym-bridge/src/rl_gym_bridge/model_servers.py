"""Waits for model servers whose addresses were reserved before they had loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from .config import DeferredBaseUrls
from .failures import GymError, GymStartError, GymTimeout
from .transport.base import Transport

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_PROBE_S = 10.0


def readiness_urls(base_url: str) -> tuple[str, ...]:
    """Where a server says that it is ready: ``/health`` beside ``/v1``, else its list of models."""
    root = base_url[: -len("/v1")] if base_url.endswith("/v1") else base_url
    return f"{root}/health", f"{base_url}/models"


async def await_model_servers(
    deferred: DeferredBaseUrls,
    transport: Transport,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return as soon as every server answers one of its readiness addresses with 200; all are asked at once.

    Args:
        deferred: the addresses and how long to wait.
        transport: asks.
        clock: seconds that only grow.

    Raises:
        GymStartError: one did not within ``deferred.ready_timeout_s``; names it and what it said last.
    """
    import asyncio

    began = clock()
    last: dict[str, str] = {}

    async def wait_for(base_url: str) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            for url in readiness_urls(base_url):
                left = began + deferred.ready_timeout_s - clock()
                try:
                    answer = await transport.get(url, timeout_s=max(0.01, min(_PROBE_S, left)))
                except GymTimeout as error:
                    # One that was cut short by the end of the waiting tells less than what came before.
                    last[base_url] = (left < _PROBE_S and last.get(base_url)) or error.problem
                    continue
                except GymError as error:
                    last[base_url] = error.problem
                    continue
                if answer.status == 200:
                    last.pop(base_url, None)
                    return
                last[base_url] = f"{url} answers with status {answer.status}"
            left = began + deferred.ready_timeout_s - clock()
            if left <= 0:
                return
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    await asyncio.gather(*(wait_for(url) for url in deferred.urls))
    if last:
        missing = [url for url in deferred.urls if url in last]
        raise GymStartError(
            f"{len(missing)} of {len(deferred.urls)} model servers did not come up: "
            + "; ".join(f"{url}: {last[url]}" for url in missing),
            component="model server",
            address=missing[0],
            elapsed_s=clock() - began,
            remedy="look at the engine's log, or allow more with DeferredBaseUrls.ready_timeout_s",
        )
