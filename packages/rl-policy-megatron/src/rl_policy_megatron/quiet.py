"""Silence for what megatron-core and torch say in normal use, and only while a call is running."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch

# Each pattern is the start of one known, harmless message: the features named are absent on
# purpose (no Transformer Engine, no Apex), or of no use to this package, so there is nothing a
# reader could do about them.
_HARMLESS_WARNINGS = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"full scope is deprecated",
    r"absl\.logging is not installed",
    r"MimoModelConfig is experimental",
    # Where Python compiles megatron's files at their first import.
    r"invalid escape sequence",
)
# What torch and megatron say of collectives: good advice where CUDA is, and no use on a CPU.
_HARMLESS_WITHOUT_CUDA = (
    r"When using (async grad allreduce|sequence parallelism) it is recommended to set",
    r"`torch\.distributed\.\w+` is deprecated",
)
# Loggers, and the starts of what they say.
_HARMLESS_RECORDS = {
    # Its successor came after 0.16, the oldest version that is supported.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # A build of torch for CUDA on a machine without.
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}


@contextmanager
def quiet_megatron() -> Generator[None]:
    """Within the scope, the known messages are dropped; everything else is shown as ever."""
    filters = [_Dropped(logging.getLogger(name), start) for name, start in _HARMLESS_RECORDS.items()]
    with warnings.catch_warnings():
        for message in _HARMLESS_WARNINGS + (() if torch.cuda.is_available() else _HARMLESS_WITHOUT_CUDA):
            warnings.filterwarnings("ignore", message=message)
        for one in filters:
            one.logger.addFilter(one)
        try:
            yield
        finally:
            for one in filters:
                one.logger.removeFilter(one)


class _Dropped(logging.Filter):
    """Keeps back records of one logger that begin in a known way."""

    def __init__(self, logger: logging.Logger, start: str) -> None:
        super().__init__()
        self.logger = logger
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._start)
