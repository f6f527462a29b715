"""Which HTTP library carries the rollouts."""

from __future__ import annotations

from typing import Literal

from ..failures import GymConfigError
from .aiohttp_transport import AiohttpTransport
from .base import Transport
from .httpx_transport import HttpxTransport

#: Above so many rollouts at a time aiohttp's lower cost per request is worth its being used.
HTTPX_DEPTH = 64


def choose_transport(name: Literal["auto", "httpx", "aiohttp"], *, max_concurrency: int) -> Transport:
    """Make the transport of that name.

    ``auto`` is aiohttp where it is installed and more than ``HTTPX_DEPTH`` rollouts may run at a time, else
    httpx.

    Raises:
        GymConfigError: aiohttp was asked for and is not installed, or there is no such transport.
    """
    if name == "httpx":
        return HttpxTransport()
    if name not in ("auto", "aiohttp"):
        raise GymConfigError(
            f"there is no transport {name!r}",
            component="transport",
            remedy="use auto, httpx or aiohttp",
        )
    if name == "auto" and max_concurrency <= HTTPX_DEPTH:
        return HttpxTransport()
    try:
        return AiohttpTransport()
    except ImportError as error:
        if name == "auto":
            return HttpxTransport()
        raise GymConfigError(
            f"aiohttp cannot be loaded ({error})",
            component="transport",
            remedy="install rl-gym-bridge[aiohttp], or set transport to auto or httpx",
        ) from error
