"""Silence for what megatron-core and torch say in normal use, and only while a call is running."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager

# Each pattern is the start of one known, harmless message: the features named are absent on
# purpose (no Transformer Engine, no Apex), so there is nothing a reader could do about them.
_HARMLESS = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"full scope is deprecated",
)


@contextmanager
def quiet_megatron() -> Generator[None]:
    """Within the scope, the known messages are dropped; every other warning is shown as ever."""
    with warnings.catch_warnings():
        for message in _HARMLESS:
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield
