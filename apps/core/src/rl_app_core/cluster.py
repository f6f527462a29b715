"""A Ray cluster for the length of a run: quiet, on loopback, and gone afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .config.sections import Cluster

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    # A worker whose driver was killed must not wait for anybody.
    "RAY_kill_child_processes_on_worker_exit": "true",
}


class ClusterError(RuntimeError):
    """No cluster could be reached or started; says which and why."""


@contextlib.contextmanager
def ray_cluster(settings: Cluster, logs: Path) -> Iterator[None]:
    """Join the cluster at ``settings.address``, or run one on this machine until the block ends.

    A cluster started here ends with this process, however it ends. After an error its logs are kept in
    ``logs/ray``.

    Raises:
        ClusterError: it cannot be reached or started.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    own = settings.address is None
    # Ray's sockets live below this folder and their paths must stay short.
    scratch = Path(tempfile.mkdtemp(prefix="rl-")) if own else None
    try:
        try:
            if own:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=256 * 2**20,
                    _temp_dir=str(scratch),
                    _node_ip_address="127.0.0.1",
                )
            else:
                ray.init(address=settings.address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            where = f"at {settings.address}" if settings.address else "on this machine"
            raise ClusterError(f"no Ray cluster {where}: {error}") from error
        yield
    except Exception:
        if scratch is not None:
            _keep_logs(scratch, logs / "ray")
        raise
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _keep_logs(scratch: Path, target: Path) -> None:
    for source in scratch.glob("session_latest/logs/*"):
        if source.is_file() and source.stat().st_size:
            target.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copy(source, target / source.name)
