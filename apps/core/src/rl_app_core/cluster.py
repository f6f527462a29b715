"""A Ray cluster for the length of a run: quiet, on loopback, and gone afterwards."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rl_generation.vllm.environment import variable_set
from rl_generation.vllm.scratch import ROOT

from .config.sections import Cluster
from .guardian import guarded_children
from .interrupts import Interrupted, handlers_kept

# A batch of rollouts is a few megabytes; Ray's default takes a third of the machine.
_OBJECT_STORE_BYTES = 256 * 2**20

_SETTINGS = {
    # What a worker started ends with it, however it ends.
    "RAY_process_group_cleanup_enabled": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    # By default actors, which do all the work of a run, give way to everything else on the machine.
    "RAY_worker_niceness": "0",
    # Workers started in advance have the driver's environment; ours bring their own.
    "RAY_prestart_worker_first_driver": "0",
}


# Ray replaces a loopback address by the machine's own and then listens on every interface, unless it believes
# that it cannot run clusters of several machines. It reads this once, when it is imported.
_ONE_MACHINE = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# Ray gives its processes 30 seconds to start, whatever it is told; a busy machine may need more, once.
_TOO_SLOW = "timed out during startup"


class ClusterError(RuntimeError):
    """No cluster could be reached or started; says which and why."""


@contextlib.contextmanager
def ray_cluster(settings: Cluster, logs: Path, *, actors: int = 1) -> Generator[None]:
    """Join the cluster at ``settings.address``, or run one on this machine until the block ends.

    A cluster started here ends with this process, however it ends. After an error its logs are kept in
    ``logs/ray``.

    Args:
        settings: where.
        logs: of the run.
        actors: how many the run starts. A cluster of its own has room for them on any machine: each takes
            turns with the others where there are fewer cores.

    Raises:
        ClusterError: it cannot be reached or started, or others could reach the one on this machine.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if settings.address is not None:
        with _connection(settings.address, address=settings.address):
            yield
        return
    os.environ.setdefault(*_ONE_MACHINE)
    # Ray's sockets live below this folder and their paths must stay short.
    scratch = Path(tempfile.mkdtemp(prefix="rl-"))
    try:
        with (
            guarded_children(scratch, wait_s=settings.shutdown_timeout_s),
            variable_set(ROOT, str(scratch)),
        ):
            try:
                with _connection(
                    "on this machine",
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, actors),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=str(scratch),
                ):
                    _check_loopback()
                    yield
            except Exception:
                # Before the guardian deletes them.
                _keep_logs(scratch, logs / "ray")
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _connection(where: str, **arguments: Any) -> Generator[None]:
    import ray

    # Until Ray's listener has ended too: a death of the last moment reaches it while Ray shuts down.
    with _silent_deaths():
        for last in (False, True):
            try:
                # Its own for SIGTERM prints a trace.
                with handlers_kept():
                    ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **arguments)
                break
            except SystemExit as error:
                # Ray's own handler for SIGTERM, which is there from the midst of its start on.
                with contextlib.suppress(Exception):
                    ray.shutdown()
                if error.code != signal.SIGTERM:
                    raise
                raise Interrupted(signal.SIGTERM, "interrupted") from None
            except Exception as error:
                if last or _TOO_SLOW not in str(error):
                    raise ClusterError(f"no Ray cluster {where}: {error}") from error
                with contextlib.suppress(Exception):
                    ray.shutdown()
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                ray.shutdown()


@contextlib.contextmanager
def _silent_deaths() -> Generator[None]:
    """Keep Ray from printing on standard output, whatever it was told, that a worker has died.

    Whoever called the worker is told, and a fleet of replicas goes on. Ray has no public setting for it.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    name = "_worker_logs_enabled"
    before = getattr(worker, name, True)
    setattr(worker, name, False)
    try:
        yield
    finally:
        setattr(worker, name, before)


def _check_loopback() -> None:
    import ray

    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise ClusterError(
            f"the Ray cluster of this machine listens on {address}, where others reach it: Ray was imported "
            f"before the run began; set {'='.join(_ONE_MACHINE)} in the environment of this process"
        )


def _keep_logs(scratch: Path, target: Path) -> None:
    for source in scratch.glob("session_latest/logs/*"):
        if source.is_file() and source.stat().st_size:
            target.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copy(source, target / source.name)
