"""Lines of JSON over a pipe, read without ever waiting longer than asked."""

from __future__ import annotations

import json
import os
import select
from typing import Any


class Channel:
    """The reading end of a pipe.

    Attributes:
        descriptor: the file descriptor.
        closed: whether the other side has closed it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.closed = False
        self._rest = b""

    def read(self, timeout_s: float, *, also: int | None = None) -> list[dict[str, Any]]:
        """The messages that arrived, after at most ``timeout_s`` seconds of waiting for the first one.

        Args:
            timeout_s: how long to wait.
            also: another descriptor that ends the wait when it can be read.
        """
        if self.closed:
            return []
        waiting = select.poll()
        waiting.register(self.descriptor, select.POLLIN)
        if also is not None:
            waiting.register(also, select.POLLIN)
        ready = dict(waiting.poll(max(0.0, timeout_s) * 1000))
        if self.descriptor not in ready:
            return []
        chunk = os.read(self.descriptor, 65536)
        if not chunk:
            self.closed = True
            return []
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines if line]


def send_message(descriptor: int, message: dict[str, Any]) -> bool:
    """Write one message; returns whether anybody is there to read it."""
    line = memoryview(json.dumps(message).encode() + b"\n")
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    except (BrokenPipeError, OSError):
        return False
    return True
