"""A Ray cluster for the length of a run: quiet, on loopback, and gone afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from .config.sections import Cluster
from .guardian import guarded_children

# A batch of rollouts is a few megabytes; Ray's default takes a third of the machine.
_OBJECT_STORE_BYTES = 256 * 2**20

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    # Workers started in advance have the driver's environment; ours bring their own.
    "RAY_prestart_worker_first_driver": "0",
}


class ClusterError(RuntimeError):
    """No cluster could be reached or started; says which and why."""


@contextlib.contextmanager
def ray_cluster(settings: Cluster, logs: Path) -> Generator[None]:
    """Join the cluster at ``settings.address``, or run one on this machine until the block ends.

    A cluster started here ends with this process, however it ends. After an error its logs are kept in
    ``logs/ray``.

    Raises:
        ClusterError: it cannot be reached or started.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if settings.address is not None:
        with _connection(settings.address, address=settings.address):
            yield
        return
    # Ray's sockets live below this folder and their paths must stay short.
    scratch = Path(tempfile.mkdtemp(prefix="rl-"))
    try:
        with guarded_children(scratch, wait_s=settings.shutdown_timeout_s):
            try:
                with _connection(
                    "on this machine",
                    address="local",
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=str(scratch),
                    _node_ip_address="127.0.0.1",
                ):
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

    try:
        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **arguments)
    except Exception as error:
        raise ClusterError(f"no Ray cluster {where}: {error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()


def _keep_logs(scratch: Path, target: Path) -> None:
    for source in scratch.glob("session_latest/logs/*"):
        if source.is_file() and source.stat().st_size:
            target.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copy(source, target / source.name)
