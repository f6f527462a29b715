"""Shutdowns: bounded, parallel, repeatable, and thorough with processes that do not want to end."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from rl_gym_bridge.config import NemoGymConfig
from rl_gym_bridge.failures import GymServerDied
from rl_gym_bridge.process import GymProcess, shutdown_all

from .conftest import Trace

pytestmark = pytest.mark.timeout(60)


def test_k3_children_that_ignore_every_polite_signal_end_and_are_reaped(make_gym) -> None:
    servers = {f"server_{number}": {"children": 1} for number in range(5)}
    gym = make_gym(stubborn=True, servers=servers, daemons=2, shutdown_timeout_s=2.0).start()
    trace = Trace(gym.run_id)
    assert len(trace.pids) >= 20
    assert len(trace.sockets) >= 10
    began = time.monotonic()
    gym.shutdown()
    assert time.monotonic() - began < 2.0 + 4.0
    assert trace.left() == []


def test_k4_what_a_shell_and_its_pipe_started_ends_too(make_gym) -> None:
    gym = make_gym(shell=True).start()
    trace = Trace(gym.run_id)
    gym.shutdown()
    assert trace.left() == []


@pytest.mark.parametrize("fault", [{"leave_servers": True}, {"ignore_sigint": True}])
def test_a_command_that_leaves_its_servers_or_ignores_sigint(make_gym, fault) -> None:
    gym = make_gym(**fault, shutdown_timeout_s=1.5).start()
    trace = Trace(gym.run_id)
    gym.shutdown()
    assert trace.left() == []


def test_a_shutdown_without_time_kills_at_once(make_gym) -> None:
    gym = make_gym(ignore_sigint=True, stubborn=True, shutdown_timeout_s=30.0).start()
    trace = Trace(gym.run_id)
    began = time.monotonic()
    gym.shutdown(0)
    # With the settings' time, SIGINT alone would have had 5 s.
    assert time.monotonic() - began < 4.5
    assert trace.left() == []
    assert gym.config.shutdown_timeout_s == 30.0


def test_a_shutdown_under_way_can_be_hurried(make_gym) -> None:
    gym = make_gym(ignore_sigint=True, shutdown_timeout_s=30.0).start()
    trace = Trace(gym.run_id)
    began = time.monotonic()
    patient = threading.Thread(target=gym.shutdown)
    patient.start()
    time.sleep(0.2)
    assert trace.left()
    gym.shutdown(0)
    patient.join(5)
    assert not patient.is_alive()
    assert time.monotonic() - began < 4.5
    assert trace.left() == []


def test_several_end_at_the_same_time(make_gym) -> None:
    several = [make_gym(ignore_sigint=True, shutdown_timeout_s=4.0).start() for _ in range(3)]
    traces = [Trace(gym.run_id) for gym in several]
    began = time.monotonic()
    shutdown_all(several)
    # Each waits 2 s for SIGINT to work; one after the other would take more than 6 s.
    assert 1.9 < time.monotonic() - began < 5.5
    assert [trace.left() for trace in traces] == [[], [], []]


def test_a_shutdown_may_come_again_and_from_several_threads(make_gym) -> None:
    gym = make_gym().start()
    trace = Trace(gym.run_id)
    threads = [threading.Thread(target=gym.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert trace.left() == []
    gym.shutdown()
    with pytest.raises(GymServerDied, match="was shut down"):
        gym.check()
    assert gym.servers == {}


def test_a_fork_of_the_trainer_does_not_end_its_gym(make_gym) -> None:
    gym = make_gym().start()
    child = os.fork()
    if child == 0:
        gym.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    gym.health(2.0)
    gym.shutdown()


def test_an_error_in_the_block_is_the_error_that_comes_out(make_gym) -> None:
    first = ValueError("in the block")
    gym = make_gym()
    traces = []

    def block() -> None:
        with gym:
            traces.append(Trace(gym.run_id))
            raise first

    with pytest.raises(ValueError, match="in the block") as caught:
        block()
    assert caught.value is first
    assert traces[0].left() == []


def test_what_gym_is_told_and_what_it_inherits(tmp_path, interpreter, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/trainer")
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    monkeypatch.setenv("VIRTUAL_ENV", "/of/the/trainer")
    asked = {
        "config_paths": ["a.yaml"],
        "policy_api_key": "sk-secret-value",
        "mcqa": {"x": [1, None, "ü\u2028"]},
    }
    config = NemoGymConfig(
        "model", base_urls=("http://127.0.0.1:1/v1",), gym_config=asked, work_dir=str(tmp_path)
    )
    with GymProcess(config, interpreter=interpreter, search_folder=tmp_path) as gym:
        folder = tmp_path / f"gym-{gym.run_id}"
        assert stat.S_IMODE((folder / "env.yaml").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "gym.log").stat().st_mode) == 0o600
        for pid in Trace(gym.run_id).pids:
            assert b"sk-secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        seen = json.loads((folder / "seen.json").read_text())
        assert seen["settings"]["mcqa"] == asked["mcqa"]
        assert seen["settings"]["policy_base_url"] == "http://127.0.0.1:1/v1"
        assert seen["arguments"][1:] == ["env", "start"]
        inherited = seen["environment"]
        assert inherited["RL_GYM_RUN_ID"] == gym.run_id
        assert inherited["WANDB_MODE"] == "disabled"
        assert not {"PYTHONPATH", "RAY_ADDRESS", "VIRTUAL_ENV"} & set(inherited)
        ray_folder = inherited["RAY_TMPDIR"]
        assert os.path.isdir(ray_folder)
    assert not (folder / "env.yaml").exists()
    assert not os.path.exists(ray_folder)
    assert (folder / "gym.log").exists()
