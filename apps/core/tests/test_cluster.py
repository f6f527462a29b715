from __future__ import annotations

import contextlib
import importlib
import os
import signal
from pathlib import Path

import pytest

from rl_app_core import cluster
from rl_app_core.config.sections import Cluster
from rl_app_core.interrupts import Interrupted


@contextlib.contextmanager
def pretended_connection(where, *, _temp_dir, **arguments):
    logs = Path(_temp_dir, "session_latest", "logs")
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("the story")
    (logs / "empty.out").write_text("")
    pretended_connection.scratch = Path(_temp_dir)
    pretended_connection.arguments = arguments
    yield


def test_after_a_failure_rays_logs_are_kept_and_its_folder_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_connection", pretended_connection)
    with pytest.raises(RuntimeError, match="first cause"), cluster.ray_cluster(Cluster(), tmp_path / "logs"):
        raise RuntimeError("first cause")
    assert [file.name for file in (tmp_path / "logs" / "ray").iterdir()] == ["raylet.err"]
    assert (tmp_path / "logs" / "ray" / "raylet.err").read_text() == "the story"
    assert not pretended_connection.scratch.exists()


def test_without_a_failure_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_connection", pretended_connection)
    with cluster.ray_cluster(Cluster(), tmp_path / "logs"):
        assert pretended_connection.scratch.exists()
    assert not (tmp_path / "logs").exists()
    assert not pretended_connection.scratch.exists()


@pytest.mark.parametrize("actors", [1, 500])
def test_f8_a_cluster_of_the_runs_own_has_room_for_all_its_actors(tmp_path, monkeypatch, actors):
    """Ray would wait for ever for a core that this machine does not have."""
    monkeypatch.setattr(cluster, "_connection", pretended_connection)
    with cluster.ray_cluster(Cluster(), tmp_path / "logs", actors=actors):
        assert pretended_connection.arguments["num_cpus"] == max(actors, os.cpu_count())


def test_ray_is_silent_about_dead_workers_for_the_length_of_a_run(monkeypatch):
    # Whoever imports Ray first decides for this process who can reach its clusters.
    monkeypatch.setenv(*cluster._ONE_MACHINE)
    worker = importlib.import_module("ray._private.worker")
    assert worker._worker_logs_enabled is True
    with cluster._silent_deaths():
        assert worker._worker_logs_enabled is False
    assert worker._worker_logs_enabled is True


def test_ray_is_silent_about_a_worker_that_dies_while_ray_shuts_down(monkeypatch):
    """Its listener runs until the shutdown has ended it, and a run's last act is to end its workers."""
    monkeypatch.setenv(*cluster._ONE_MACHINE)
    ray = importlib.import_module("ray")
    worker = importlib.import_module("ray._private.worker")
    shown = []
    monkeypatch.setattr(ray, "init", lambda **_: shown.append(worker._worker_logs_enabled))
    monkeypatch.setattr(ray, "shutdown", lambda: shown.append(worker._worker_logs_enabled))
    with cluster._connection("here"):
        shown.append(worker._worker_logs_enabled)
    assert shown == [False, False, False]
    assert worker._worker_logs_enabled is True


@pytest.mark.parametrize(
    ("failures", "calls"),
    [
        ([], 1),
        (["The current node timed out during startup. This could happen"], 2),
        (["The current node timed out during startup."] * 2, 2),
        (["no such address"], 1),
    ],
)
def test_ray_may_be_too_slow_to_start_once(failures, calls, monkeypatch):
    # Read when Ray is imported for the first time, which may be here.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    begun, left = [], list(failures)

    def init(**arguments):
        begun.append(arguments)
        if left:
            raise RuntimeError(left.pop(0))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with contextlib.ExitStack() as stack:
        if len(failures) == calls:
            stack.enter_context(pytest.raises(cluster.ClusterError, match="no Ray cluster here"))
        with cluster._connection("here", address="local"):
            pass
    assert len(begun) == calls
    assert all(arguments["address"] == "local" for arguments in begun)


def test_a_sigterm_that_meets_ray_in_its_start_is_an_interrupt_and_no_exit_code_of_rays(monkeypatch):
    """Ray's handler ends the process with the signal's number for exit code, which here means a stall."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    def init(**_):
        raise SystemExit(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Interrupted) as caught, cluster._connection("here"):
        raise AssertionError("nothing runs")
    assert caught.value.signal_number == signal.SIGTERM
