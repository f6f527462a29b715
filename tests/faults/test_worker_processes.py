"""Which processes a run starts on this machine: who can reach them, and that none outlives its worker."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from rl_actor_envs.runtime import make_actor_runtime_env
from rl_app_core.cluster import ClusterError, ray_cluster
from rl_app_core.config.sections import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TITLE = "sleeper-of-the-worker-process-test"


class Parent:
    """An actor with children that know nothing of Ray."""

    def start_children(self) -> int:
        """A direct child, and a grandchild behind a shell; returns the actor's process id."""
        sleep = [sys.executable, "-c", "import time; time.sleep(300)", TITLE]
        subprocess.Popen(sleep)
        # The shell stays the parent: it has something to do afterwards.
        subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *sleep])
        return os.getpid()

    def paths(self) -> list[str]:
        return [entry for entry in sys.path if entry in ("/first", "/second")]

    def interpreter(self) -> str:
        return sys.executable


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
        with ray_cluster(Cluster(threads=1), tmp_path_factory.mktemp("logs")):
            yield


def _actor(env_vars=None):
    import ray

    runtime_env = make_actor_runtime_env("rl_app_core.workers.ColocatedWorker", env_vars=env_vars)
    return ray.remote(Parent).options(max_restarts=0, runtime_env=dict(runtime_env)).remote()


def _sleepers() -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if TITLE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_i1_what_a_worker_started_ends_when_the_worker_is_killed():
    import ray

    actor = _actor()
    pid = ray.get(actor.start_children.remote(), timeout=60)
    deadline = time.monotonic() + 30
    while len(_sleepers()) < 2:
        assert time.monotonic() < deadline, "the children did not start"
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while (left := _sleepers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == []


def test_i3_the_system_flag_runs_the_actor_on_the_drivers_interpreter():
    import ray

    assert ray.get(_actor().interpreter.remote(), timeout=60) == sys.executable


def test_i4_the_callers_pythonpath_reaches_the_actor_in_order():
    import ray

    actor = _actor({"PYTHONPATH": "/first:/second"})
    assert ray.get(actor.paths.remote(), timeout=60) == ["/first", "/second"]


def test_no_process_of_the_cluster_can_be_reached_from_another_machine():
    import ray

    ray.get(_actor().interpreter.remote(), timeout=60)
    run = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    listening = [
        entry.laddr.ip
        for entry in psutil.net_connections("inet")
        if entry.pid in run and entry.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 4
    assert [address for address in listening if not _is_loopback(address)] == []


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def _own_addresses() -> list[str]:
    return [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not _is_loopback(entry.address)
    ]


def test_a_cluster_that_others_could_reach_is_refused():
    """Ray, imported before the setting could reach it, would listen on every interface."""
    if not _own_addresses():
        pytest.skip("this machine has no address that others could reach")
    script = (
        "import ray, pathlib, tempfile\n"
        "from rl_app_core.cluster import ray_cluster\n"
        "from rl_app_core.config.sections import Cluster\n"
        "with ray_cluster(Cluster(threads=1), pathlib.Path(tempfile.mkdtemp())):\n"
        "    print('started')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert f"{ClusterError.__module__}.{ClusterError.__name__}: the Ray cluster" in done.stderr
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in done.stderr
