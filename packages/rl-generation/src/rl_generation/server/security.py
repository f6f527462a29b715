"""Who may talk to a server: this machine, or whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress

from .asgi import Scope, header
from .refusals import UnauthorizedError


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only. A name other than ``localhost`` does not count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether an address stands for all of this machine's."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def check_bearer(token: str) -> None:
    """Raise :class:`ValueError`, without the token, where no request could carry it."""
    if not token.strip():
        raise ValueError("the server's token is empty; give one or none")
    if token != token.strip():
        raise ValueError(
            "the server's token begins or ends with a space or a line's end, which no request can carry; "
            "remove it, for instance with $(cat FILE) where the token comes out of a file"
        )
    if not token.isascii() or not token.isprintable():
        raise ValueError(
            "the server's token has a character that an HTTP header cannot carry; take printable ASCII only"
        )


def check_token(scope: Scope, token: str | None) -> None:
    """Raise :class:`UnauthorizedError` where a request does not carry ``Authorization: Bearer <token>``.

    The comparison takes the same time wherever the texts differ, and no error holds either of them. Without
    a token everybody may come, which only a loopback address allows.
    """
    if token is None:
        return
    scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), token.encode()):
        raise UnauthorizedError("server: this address wants an Authorization header with its bearer token")
