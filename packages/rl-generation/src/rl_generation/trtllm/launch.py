"""Starting ``AsyncLLM`` and its workers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from ..failures import DeadlineError
from ..fleet.threads import in_thread
from .api import TrtllmApi, load_api
from .faults import classified
from .llm_arguments import llm_arguments
from .settings import TrtllmSettings


@dataclass(frozen=True, slots=True)
class Launched:
    """An engine whose workers have the checkpoint.

    Attributes:
        llm: the ``AsyncLLM``.
        api: what its release offers.
        devices: UUIDs of the workers' GPUs, by rank.
    """

    llm: Any
    api: TrtllmApi
    devices: tuple[str, ...]


async def launch(settings: TrtllmSettings) -> Launched:
    """Import TensorRT-LLM, start the workers and load the checkpoint.

    Raises:
        UnavailableBackendError: the package cannot be imported or is too old.
        DeadlineError: not ready within ``start_timeout_s``.
        GenerationError: the model or an argument is unsuitable, or a worker died.
    """
    deadline = time.monotonic() + settings.start_timeout_s
    api = await in_thread(load_api, f"{settings.name}: importing", settings.start_timeout_s)
    llm: Any = None
    try:
        with classified(settings.name, "start"):
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                llm = api.async_llm(**llm_arguments(settings, api))
                await llm.setup_async()
                devices = await llm.collective_rpc("report_device_id")
    except BaseException as error:
        if llm is not None:
            await end(llm, settings.name, settings.probe_timeout_s)
        if isinstance(error, TimeoutError):
            raise DeadlineError(
                f"{settings.name}: not ready within {settings.start_timeout_s:g} s"
            ) from error
        raise
    return Launched(llm, api, tuple(str(device) for device in devices))


async def end(llm: Any, component: str, timeout_s: float) -> None:
    """End the workers.

    Raises:
        DeadlineError: they did not end in time; they do with this process.
    """
    await in_thread(llm.shutdown, f"{component}: shutting down", timeout_s)
