"""What TensorRT-LLM needs of a machine, looked for without importing it."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Protocol

from ..failures import UnavailableBackendError

COMPONENT = "TensorRT-LLM"
OLDEST = "1.2"
"""The oldest release whose calls this package was written against."""

_DEVICES = Path("/dev")


class Machine(Protocol):
    """The three facts that decide."""

    def has_package(self, name: str) -> bool:
        """Whether this interpreter could import it."""
        ...

    def loads_library(self, name: str) -> bool:
        """Whether the dynamic linker finds it."""
        ...

    def gpus(self) -> int:
        """Number of GPUs, whether or not this process may use them."""
        ...


class ThisMachine:
    """Where this process runs."""

    def has_package(self, name: str) -> bool:
        """See :class:`Machine`; a module without a specification, put there by hand, counts as absent."""
        try:
            return importlib.util.find_spec(name) is not None
        except ValueError:
            return False

    def loads_library(self, name: str) -> bool:
        """See :class:`Machine`."""
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    def gpus(self) -> int:
        """See :class:`Machine`. Device nodes, because Ray hides GPUs from an actor that asks for none."""
        return sum(1 for node in _DEVICES.glob("nvidia*") if node.name.removeprefix("nvidia").isdigit())


def missing(machine: Machine) -> list[str]:
    """What stands between this machine and TensorRT-LLM, each with its remedy; empty if nothing does."""
    lacks: list[str] = []
    if not machine.has_package("tensorrt_llm"):
        lacks.append(
            f"the package tensorrt_llm ({OLDEST} or newer) is not installed here: run this actor in the "
            "environment of the extra `trtllm`, whose wheel comes from NVIDIA's package index"
        )
    if not machine.has_package("ray"):
        lacks.append("the package ray is not installed here: it starts TensorRT-LLM's workers; install `ray`")
    if not machine.loads_library("libcuda.so.1"):
        lacks.append(
            "libcuda.so.1 is not found: it belongs to the NVIDIA driver; install the driver, or start the "
            "container with the NVIDIA runtime"
        )
    if machine.gpus() < 1:
        lacks.append("there is no NVIDIA GPU: use a machine that has one, or another engine")
    return lacks


def require_available(machine: Machine | None = None) -> None:
    """Say at once, and all of it, what is missing.

    Raises:
        UnavailableBackendError: at least one thing is.
    """
    if lacks := missing(machine or ThisMachine()):
        raise UnavailableBackendError(f"{COMPONENT} cannot run on this machine: " + "; ".join(lacks))
