"""The addresses of model servers: a list, none at all, or reserved ones whose servers still load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..failures import GymConfigError

_FORMS = (
    "[] where there is no server, a list of http://host:port/v1, or DeferredBaseUrls for reserved addresses"
)


def checked_base_urls(urls: Any, where: str = "base_urls") -> tuple[str, ...]:
    """The addresses as a tuple, without trailing slashes.

    Args:
        urls: a sequence of ``http(s)://host[:port][/path]``, possibly empty.
        where: name of the setting, for messages.

    Raises:
        GymConfigError: no sequence, an entry that is ``None`` or no such address, or the same address twice.
    """
    if isinstance(urls, (str, bytes)):
        raise GymConfigError(
            f"{urls!r} is one string, not a list", component=where, remedy=f"write [{urls!r}]"
        )
    if urls is None or not isinstance(urls, Sequence):
        raise GymConfigError(f"{urls!r} is not a list of addresses", component=where, remedy=f"give {_FORMS}")
    found: dict[str, int] = {}
    for index, url in enumerate(urls):
        place = f"{where}[{index}]"
        if url is None:
            raise GymConfigError(
                f"it is None, one of {len(urls)} entries",
                component=place,
                remedy=f"decide for the list as a whole: {_FORMS}",
            )
        address = _checked(url, place)
        if address in found:
            raise GymConfigError(
                f"{address} is entry {found[address]} already",
                component=place,
                remedy="name each server once",
            )
        found[address] = index
    return tuple(found)


def _checked(url: Any, where: str) -> str:
    # Only here, because it is not needed to import the bridge.
    from urllib.parse import urlsplit

    fault = f"is a {type(url).__name__}" if not isinstance(url, str) else ""
    if not fault:
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError as error:
            fault = str(error)
        else:
            if any(character.isspace() or not character.isprintable() for character in url):
                fault = "holds white space"
            elif parts.scheme not in ("http", "https"):
                fault = f"has the scheme {parts.scheme!r}, not http or https"
            elif not host or port == 0:
                fault = "names no host" if not host else "has port 0"
            elif "@" in parts.netloc:
                # Gym's head server shows its settings to anyone who asks. Not repeated here either.
                raise GymConfigError(
                    "it holds a password or user name", component=where, remedy="use policy_api_key for keys"
                )
            elif parts.query or parts.fragment or "?" in url or "#" in url:
                fault = "has a query or fragment"
    if fault:
        raise GymConfigError(f"{url!r} {fault}", component=where, remedy="write http://host:port/v1")
    return str(url).rstrip("/")
