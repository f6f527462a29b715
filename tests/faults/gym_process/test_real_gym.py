"""The same promises with a real Gym: the smallest deployment, its Ray cluster included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from rl_gym_bridge.config import NemoGymConfig
from rl_gym_bridge.failures import GymServerDied
from rl_gym_bridge.interpreter import VARIABLE, find_gym_interpreter
from rl_gym_bridge.process import GymProcess

from .conftest import WITHIN_S, Trace, guardians, processes_of, server_process
from .trainer import MCQA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def real_gym(gym_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, gym_python)


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
ODD = {"what YAML would change \u2028\x85\xa0\ufeff": [1e-05, None, "yes", "1.0", "'\"\\ \U0001f600"]}


def _addresses(inodes: set[str]) -> set[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def _parsed_by_gym(text: str) -> dict:
    script = "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin.buffer), sys.stdout)"
    python = find_gym_interpreter().python
    answer = subprocess.run([python, "-c", script], input=text.encode(), capture_output=True, check=True)
    return json.loads(answer.stdout)


def _gym(folder: Path, **more: object) -> GymProcess:
    settings = {"config_paths": MCQA, "policy_api_key": "sk-of-this-test", **more}
    urls = ("http://127.0.0.1:9/v1",)
    config = NemoGymConfig("policy", urls, settings, work_dir=str(folder), start_timeout_s=240.0)
    return GymProcess(config, search_folder=folder)


def _check_for(gym: GymProcess, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        gym.check()
        time.sleep(0.01)


def test_a_deployment_from_its_start_to_the_death_of_a_server(tmp_path: Path) -> None:
    gym = _gym(tmp_path, notes=ODD)
    with gym:
        assert gym.version
        assert set(gym.agents) == {"mcqa_simple_agent"}
        assert {"policy_model", "mcqa", "mcqa_simple_agent"} <= set(gym.servers)
        gym.health(5.0)
        trace = Trace(gym.run_id)
        # N4: Gym's servers, and the Ray cluster that it starts for itself.
        assert len(trace.sockets) > 5
        assert _addresses(trace.sockets) <= LOOPBACK
        with urllib.request.urlopen(f"{gym.head_url}/global_config_dict_yaml") as answer:
            told = _parsed_by_gym(json.load(answer))
        assert told["notes"] == ODD
        assert told["policy_api_key"] == "sk-of-this-test"
        os.kill(server_process(gym, "mcqa"), signal.SIGKILL)
        with pytest.raises(GymServerDied) as caught:
            _check_for(gym, 5.0)
        assert caught.value.component == "mcqa"
        assert "sk-of-this-test" not in str(caught.value)
    trace.look()
    assert trace.left() == []
    assert not list(tmp_path.glob("gym-*/env.yaml"))


def test_a_killed_trainer_leaves_nothing_of_a_ready_gym(trainer) -> None:
    program = trainer("sleep", gym="real")
    assert len(program.trace.pids) > 10
    program.kill()
    program.trace.gone_after()


@pytest.mark.parametrize("after_s", [2.0, 12.0])
def test_a_start_that_is_broken_off_leaves_nothing(trainer, after_s) -> None:
    program = trainer("sleep while starting", gym="real")
    time.sleep(after_s)
    program.trace.look()
    program.kill()
    program.trace.gone_after()
    assert processes_of(program.trace.run_id) == {}


def test_a_killed_guardian_leaves_nothing(tmp_path: Path) -> None:
    gym = _gym(tmp_path).start()
    trace = Trace(gym.run_id)
    for pid in guardians(gym.run_id):
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    gym.shutdown()
    assert time.monotonic() - began < 10
    trace.look()
    trace.gone_after(WITHIN_S)
