"""Starts that fail, at every step: the first error as it was, what the log says, and nothing left."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rl_gym_bridge import process
from rl_gym_bridge.config import NemoGymConfig
from rl_gym_bridge.failures import GymConfigError, GymServerDied, GymStartError
from rl_gym_bridge.process import GymProcess
from rl_gym_bridge.supervision import deployment, launch, starting

from .conftest import Trace, processes_of

pytestmark = pytest.mark.timeout(60)

STEPS = [
    (process, "find_gym_interpreter"),
    (starting, "choose_ports"),
    (starting, "gym_settings"),
    (starting.Deployment, "prepare"),
    (deployment, "write_settings"),
    (starting.Deployment, "launch"),
    (deployment, "gym_environment"),
    (launch, "Channel"),
    (launch, "send_message"),
    (launch.subprocess, "Popen"),
    (launch.GuardedCommand, "_await_start"),
    (starting.Deployment, "await_head"),
    (deployment, "get_all"),
    (deployment, "parse_servers"),
    (starting.Deployment, "await_servers"),
    (launch.GuardedCommand, "problem"),
]


class Injected(Exception):
    """Not an error that the code under test knows."""


@pytest.mark.parametrize("kind", [Injected, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("owner", "name"), STEPS)
def test_an_error_at_any_step_comes_out_as_it_was_and_leaves_nothing(
    make_gym, monkeypatch, interpreter, tmp_path, owner, name, kind
) -> None:
    first = kind("the first error")

    def fail(*_: object, **__: object) -> None:
        raise first

    gym = make_gym(daemons=2)
    if name == "find_gym_interpreter":
        gym = GymProcess(NemoGymConfig("model", work_dir=str(tmp_path)), search_folder=tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(kind) as caught:
        gym.start()
    assert caught.value is first
    if gym.run_id:
        Trace(gym.run_id).gone_after()
        assert not (tmp_path / f"gym-{gym.run_id}" / "env.yaml").exists()
    assert list(scratch.iterdir()) == []
    gym.shutdown()


def test_a_failing_cleanup_does_not_replace_the_first_error(make_gym, monkeypatch) -> None:
    first = Injected("the first error")
    end = launch.GuardedCommand.end

    def fail(*_: object) -> None:
        raise first

    def fail_after(self, seconds):
        end(self, seconds)
        raise Injected("in the cleanup")

    monkeypatch.setattr(starting.Deployment, "await_servers", fail)
    gym = make_gym()
    with monkeypatch.context() as patch:
        patch.setattr(launch.GuardedCommand, "end", fail_after)
        with pytest.raises(Injected) as caught:
            gym.start()
    assert caught.value is first
    Trace(gym.run_id).gone_after()


def test_a_command_that_ends_at_start_shows_its_log_without_secrets(tmp_path, interpreter) -> None:
    config = NemoGymConfig(
        "model",
        gym_config={
            "policy_api_key": "sk-very-secret-1",
            "double": {
                "exit_at_start": 3,
                "say": [
                    "INFO: noise",
                    "Traceback (most recent call last):",
                    "ConfigError: cannot reach the judge with sk-very-secret-1",
                    "HF_TOKEN=hf_abcdefgh num_tokens=17",
                ],
            },
        },
        work_dir=str(tmp_path),
    )
    gym = GymProcess(config, interpreter=interpreter, search_folder=tmp_path)
    with pytest.raises(GymStartError) as caught:
        gym.start()
    said = str(caught.value)
    assert "exit code 3" in said
    assert "ConfigError: cannot reach the judge with ***" in said
    assert "num_tokens=17" in said
    assert "hf_abcdefgh" not in said
    assert "noise" not in said
    assert str(gym.log_path) in said
    assert not (tmp_path / f"gym-{gym.run_id}" / "env.yaml").exists()
    Trace(gym.run_id).gone_after()


def test_a_server_that_ends_at_start_is_named_with_its_own_words(make_gym) -> None:
    gym = make_gym(servers={"answers": {"exit_at_start": 1}})
    with pytest.raises(GymStartError, match="the weights of this server are not there") as caught:
        gym.start()
    assert "answers" in str(caught.value)
    Trace(gym.run_id).gone_after()


@pytest.mark.parametrize("fault", [{"ready_after_s": 60}, {"listen_after_s": 60}, {"status": 500}])
def test_k8_no_server_is_missing_when_gym_is_ready_and_the_deadline_names_it(
    make_gym, monkeypatch, fault
) -> None:
    await_servers = starting.Deployment.await_servers
    began = []

    def until_it_is_up(self, deadline, stopping) -> None:
        """The time is up soon after the servers are waited for, whatever the steps before took."""
        began.append(time.monotonic())
        assert 0 < deadline - began[0] <= 40
        await_servers(self, began[0] + 1.0, stopping)

    monkeypatch.setattr(starting.Deployment, "await_servers", until_it_is_up)
    gym = make_gym(start_timeout_s=40.0, servers={"answers": fault})
    with pytest.raises(GymStartError, match="not ready: answers") as caught:
        gym.start()
    assert time.monotonic() - began[0] < 1.0 + 15
    assert caught.value.component == "answers"
    assert gym.agents == {}
    Trace(gym.run_id).gone_after()


def test_k8_a_child_that_is_late_is_waited_for(make_gym) -> None:
    began = time.monotonic()
    gym = make_gym(list_after_s=0.1, servers={"answers_agent": {"ready_after_s": 0.6}}).start()
    assert time.monotonic() - began > 0.6
    gym.health(2.0)
    gym.shutdown()


def test_a_head_that_lists_nothing_meets_the_deadline(make_gym) -> None:
    gym = make_gym(start_timeout_s=0.8, list_after_s=60)
    with pytest.raises(GymStartError, match="listed no servers"):
        gym.start()
    Trace(gym.run_id).gone_after()


def test_a_port_that_another_program_takes_is_no_failure(make_gym, tmp_path) -> None:
    gym = make_gym(occupy=str(tmp_path / "taken-once")).start()
    assert gym.agents
    assert len(list(tmp_path.glob("gym-*"))) == 2
    gym.shutdown()


def test_a_server_that_speaks_of_ports_and_goes_on_is_no_failure(make_gym, tmp_path) -> None:
    said = "my cache: [Errno 98] error while attempting to bind on address: address already in use"
    gym = make_gym(say=[said]).start()
    assert said in (gym.log_path or tmp_path).read_text()
    assert len(list(tmp_path.glob("gym-*"))) == 1
    gym.shutdown()


def test_a_head_server_without_its_port_is_not_waited_for(make_gym, tmp_path, monkeypatch) -> None:
    # As Gym does: the thread of the head server ends, and the rest goes on.
    launch_it = starting.Deployment.launch

    def without_port(self) -> None:
        first = len(list(tmp_path.glob("gym-*"))) == 1
        if first:
            port = self.head_url.rpartition(":")[2]
            said = f"ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', {port})"
            self.log.write_text(f"{said}: address already in use\n")
        launch_it(self)

    monkeypatch.setattr(starting.Deployment, "launch", without_port)
    gym = make_gym().start()
    assert len(list(tmp_path.glob("gym-*"))) == 2
    gym.shutdown()


def test_what_survives_a_failed_attempt_is_ended_with_the_rest(make_gym, monkeypatch) -> None:
    attempts: list[Trace] = []
    await_head, end = starting.Deployment.await_head, starting.Deployment.end

    def taken_once(self, *arguments) -> None:
        await_head(self, *arguments)
        if not attempts:
            attempts.append(Trace(self.run_id))
            raise deployment.PortTaken("another program has it")

    def end_nothing_in_time(self, seconds):
        return [] if seconds == 1.0 else end(self, seconds)

    monkeypatch.setattr(starting.Deployment, "await_head", taken_once)
    monkeypatch.setattr(starting.Deployment, "end", end_nothing_in_time)
    gym = make_gym().start()
    assert attempts[0].run_id != gym.run_id
    assert attempts[0].left()
    gym.shutdown()
    assert attempts[0].left() == []


def test_another_gym_at_our_port_is_never_mistaken_for_ours(
    make_gym, interpreter, tmp_path, monkeypatch
) -> None:
    other = make_gym().start()
    ports = iter([int(other.head_url.rpartition(":")[2])])
    choose = starting.choose_ports

    def choose_theirs_first(*arguments):
        ours = choose(*arguments)
        theirs = next(ports, None)
        return ours if theirs is None else deployment.Ports(ours.low, ours.high, theirs, False)

    monkeypatch.setattr(starting, "choose_ports", choose_theirs_first)
    gym = make_gym().start()
    assert gym.head_url != other.head_url
    assert set(gym.agents.values()).isdisjoint(other.agents.values())
    assert {server.process.pid for server in gym.servers.values()} <= set(processes_of(gym.run_id))
    process.shutdown_all([gym, other])


def test_a_fixed_port_in_use_is_an_error_at_once(interpreter, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = NemoGymConfig("model", gym_config={"head_server": {"port": port}}, work_dir=str(tmp_path))
        with pytest.raises(GymStartError, match=f"port {port} is in use"):
            GymProcess(config, interpreter=interpreter).start()


def test_n4_a_server_that_other_machines_reach_is_refused(make_gym) -> None:
    gym = make_gym(servers={"answers": {"host": "0.0.0.0"}})
    with pytest.raises(GymStartError, match=r"answers listens on 0\.0\.0\.0"):
        gym.start()
    Trace(gym.run_id).gone_after()


@pytest.mark.parametrize(
    "wide", [{"default_host": "0.0.0.0"}, {"head_server": {"host": "192.0.2.1"}}, {"use_absolute_ip": True}]
)
def test_n4_settings_that_open_gym_to_others_are_refused_before_anything_starts(
    tmp_path, interpreter, wide
) -> None:
    gym = GymProcess(NemoGymConfig("model", gym_config=wide, work_dir=str(tmp_path)), interpreter=interpreter)
    with pytest.raises(GymConfigError, match="other machines reach it"):
        gym.start()
    assert not list(tmp_path.iterdir())


def test_a_shutdown_during_the_start_ends_both(make_gym) -> None:
    gym = make_gym(list_after_s=60)
    errors = []

    def start() -> None:
        try:
            gym.start()
        except GymStartError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    while not gym.run_id or len(processes_of(gym.run_id)) < 4:
        time.sleep(0.01)
    trace = Trace(gym.run_id)
    gym.shutdown()
    trace.look()
    assert trace.left() == []
    starter.join(5)
    assert "shut down while it started" in str(errors[0])


def test_a_shutdown_before_anything_is_launched_waits_for_the_start_to_give_up(make_gym, monkeypatch) -> None:
    gym = make_gym()
    entered = threading.Event()
    environment = deployment.gym_environment

    def late(*arguments, **more):
        entered.set()
        gym._stopping.wait(5)
        time.sleep(0.2)
        return environment(*arguments, **more)

    monkeypatch.setattr(deployment, "gym_environment", late)
    errors = []

    def start() -> None:
        try:
            gym.start()
        except GymStartError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    assert entered.wait(5)
    gym.shutdown()
    starter.join(0.2)
    assert not starter.is_alive()
    assert len(errors) == 1
    assert Trace(gym.run_id).left() == []


@pytest.mark.parametrize(("step", "prepared"), [("gym_settings", False), ("prepare", True)])
def test_after_a_shutdown_nothing_is_prepared_or_launched(
    make_gym, monkeypatch, tmp_path, step, prepared
) -> None:
    gym = make_gym()
    owner = starting.Deployment if step == "prepare" else starting
    real = getattr(owner, step)

    def and_shut_down(*arguments):
        gym.ask_shutdown()
        return real(*arguments)

    def launched(self) -> None:
        pytest.fail("it was launched")

    monkeypatch.setattr(owner, step, and_shut_down)
    monkeypatch.setattr(starting.Deployment, "launch", launched)
    with pytest.raises(GymStartError, match="shut down while it started"):
        gym.start()
    assert len(list(tmp_path.glob("gym-*"))) == prepared


def test_what_cannot_start_says_so(tmp_path, interpreter) -> None:
    gym = GymProcess(NemoGymConfig("model", work_dir=str(tmp_path)), interpreter=interpreter)
    with pytest.raises(GymServerDied, match="was not started"):
        gym.check()
    gym.shutdown()
    gym.shutdown()
    assert not list(Path(tmp_path).iterdir())
    with pytest.raises(GymStartError, match="shut down"):
        gym.start()
    missing = type(interpreter)(tmp_path / "python", tmp_path / "gym", "0.4.0", "3.12.0")
    gym = GymProcess(NemoGymConfig("model", work_dir=str(tmp_path)), interpreter=missing)
    with pytest.raises(GymStartError, match="cannot be started"):
        gym.start()
    Trace(gym.run_id).gone_after()
