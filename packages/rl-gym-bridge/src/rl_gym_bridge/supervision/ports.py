"""Ports of this machine for a Gym deployment."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..failures import GymConfigError

# Below the ports that Linux gives to outgoing connections, above those of well-known services.
_LOWEST = 11_000
_HIGHEST = 32_000
_WINDOW = 500
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a deployment listens.

    Attributes:
        low: first port of its servers.
        high: last port of its servers.
        head: port of its head server.
        head_is_fixed: whether the user chose that one.
    """

    low: int
    high: int
    head: int
    head_is_fixed: bool


def choose_ports(gym_config: Mapping[str, Any], rng: random.Random) -> Ports:
    """The user's range, else a random one; a head port in it that nobody listens on at this moment.

    Between this choice and Gym's use of a port another program may take it: who starts Gym must be ready to
    choose again.

    Raises:
        GymConfigError: the user's range is none, or no port of it is free.
    """
    low, high = gym_config.get("port_range_low"), gym_config.get("port_range_high")
    if low is None and high is None:
        low = rng.randrange(_LOWEST, _HIGHEST - _WINDOW, _WINDOW)
        high = low + _WINDOW - 1
    elif low is None:
        low = max(1024, _port(high, "port_range_high") - _WINDOW + 1)
    elif high is None:
        high = min(65535, _port(low, "port_range_low") + _WINDOW - 1)
    low, high = _port(low, "port_range_low"), _port(high, "port_range_high")
    if high - low + 1 < _FEWEST:
        raise GymConfigError(
            f"ports {low} to {high} are too few",
            component="gym_config.port_range_high",
            remedy="leave the range out, or give each server a port",
        )
    head = gym_config.get("head_server")
    fixed = head.get("port") if isinstance(head, Mapping) else None
    if fixed is not None:
        return Ports(low, high, _port(fixed, "head_server.port"), True)
    for port in rng.sample(range(low, high + 1), high - low + 1):
        if is_free(port):
            return Ports(low, high, port, False)
    raise GymConfigError(
        f"no port from {low} to {high} is free",
        component="gym_config.port_range_low",
        remedy="choose another range or leave it out",
    )


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback address now."""
    with socket.socket() as attempt:
        # As servers do: connections that only linger are no obstacle.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
            attempt.listen(1)
        except OSError:
            return False
    return True


def _port(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise GymConfigError(
            f"{value!r} is no port", component=f"gym_config.{name}", remedy="use 1024 to 65535"
        )
    return value
