"""The lines of Gym's log that explain a failure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..redaction import redacted_text

_READ_BYTES = 128 * 1024
_LAST_LINES = 8
_TELLING_LINES = 12
_LONGEST_LINE = 400
_TELLING = re.compile(
    r"\w*Error\b|\w*Exception\b|unexpectedly|already in use|No space left|not found|No such file|Killed"
    r"|refused|fatal",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"^\s*(\([^)]*\) )?INFO\b|Connecting to .*Ray cluster|Connected to Ray cluster|uvicorn logging filter"
)
_PORT_TAKEN = re.compile(r"address already in use|Errno 98\b", re.IGNORECASE)
_SERVER_ENDED = re.compile(r"Process `([^`]+)` finished unexpectedly")


def read_end(path: Path) -> str:
    """The last 128 KiB of a log, empty if there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def excerpt(path: Path, secrets: Iterable[str] = ()) -> str:
    """The lines that tell of errors and the last ones, without secrets; empty for an empty log."""
    lines = [line.rstrip()[:_LONGEST_LINE] for line in read_end(path).splitlines()]
    lines = [line for line in lines if line.strip() and not _NOISE.search(line)]
    last = range(max(0, len(lines) - _LAST_LINES), len(lines))
    telling = [index for index, line in enumerate(lines) if _TELLING.search(line)][-_TELLING_LINES:]
    chosen = sorted({*telling, *last})
    return redacted_text("\n".join(lines[index] for index in chosen), secrets)


def port_was_taken(path: Path, port: int | None = None) -> bool:
    """Whether a log says that something could not listen because another program had its port.

    Args:
        path: the log.
        port: only that something of one line, which names this port.
    """
    lines = read_end(path).splitlines()
    named = re.compile(rf"\b{port}\b") if port is not None else re.compile("")
    return any(_PORT_TAKEN.search(line) and named.search(line) for line in lines)


def ended_servers(path: Path) -> frozenset[str]:
    """Servers whose end made Gym end itself."""
    return frozenset(_SERVER_ENDED.findall(read_end(path)))
