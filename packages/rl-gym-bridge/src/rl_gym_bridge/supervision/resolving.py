"""Addresses of host names, within a deadline: the system's resolver has none that one could set."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable, Mapping


def addresses_of(hosts: Iterable[str], deadline: float) -> Mapping[str, str | OSError]:
    """An IP address of every host, IPv4 where it has one, or why there is none; all asked at the same time.

    Args:
        hosts: names and IP addresses, without brackets.
        deadline: by ``time.monotonic``. What is not known then is a :class:`TimeoutError`.
    """
    found: dict[str, str | OSError] = {}
    asked: dict[str, threading.Thread] = {}
    for host in dict.fromkeys(hosts):
        try:
            ipaddress.ip_address(host)
            found[host] = host
        except ValueError:
            # Nothing ends a resolver that hangs but its own bound; the program's end does not wait for it.
            asked[host] = threading.Thread(target=_resolve, args=(host, found), daemon=True)
            asked[host].start()
    for thread in asked.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    return {
        host: found.get(host, TimeoutError("its name was not resolved in time")) for host in (*found, *asked)
    }


def _resolve(host: str, found: dict[str, str | OSError]) -> None:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
        found[host] = str(entries[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        found[host] = OSError(f"its name cannot be resolved: {reason}")
