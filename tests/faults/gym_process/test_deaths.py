"""Servers, guardians and trainers that die or hang: named, and nothing of Gym left within 5 s."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import threading
import time
from urllib.parse import urlsplit

import pytest

from rl_gym_bridge.failures import GymServerDied, GymStartError

from .conftest import N, Trace, guardians, rounds, server_process

pytestmark = pytest.mark.timeout(60 + 10 * N)


def _named(gym, name: str, within_s: float) -> GymServerDied:
    began = time.monotonic()
    while True:
        error = _checked(gym)
        assert time.monotonic() - began < within_s, error or "check() saw nothing"
        if error is not None:
            assert name in error.component.split(", "), str(error)
            return error
        time.sleep(0.01)


def _checked(gym) -> GymServerDied | None:
    try:
        gym.check()
    except GymServerDied as error:
        return error
    return None


@pytest.mark.parametrize("poll_s", [0.05, 60.0])
@rounds
def test_a_killed_idle_server_is_named_whether_gym_noticed_or_not(make_gym, poll_s) -> None:
    gym = make_gym(poll_s=poll_s).start()
    trace = Trace(gym.run_id)
    os.kill(server_process(gym, "answers"), signal.SIGKILL)
    _named(gym, "answers", 2.0)
    with pytest.raises(GymServerDied) as caught:
        gym.health(1.0)
    assert "answers" in str(caught.value)
    gym.shutdown()
    trace.gone_after()


@rounds
def test_a_server_killed_while_it_serves_ends_the_request_and_is_named(make_gym) -> None:
    gym = make_gym(poll_s=60.0).start()
    trace = Trace(gym.run_id)
    outcome: list[BaseException] = []

    def request() -> None:
        connection = http.client.HTTPConnection(urlsplit(gym.agents["answers_agent"]).netloc, timeout=20)
        try:
            connection.request("POST", "/run", "{}")
            connection.getresponse()
        except Exception as error:
            outcome.append(error)

    client = threading.Thread(target=request)
    client.start()
    time.sleep(0.1)
    os.kill(server_process(gym, "answers_agent"), signal.SIGKILL)
    _named(gym, "answers_agent", 2.0)
    client.join(2.0)
    assert isinstance(outcome[0], (ConnectionError, http.client.HTTPException))
    gym.shutdown()
    trace.gone_after()


@pytest.mark.parametrize("poll_s", [0.05, 60.0])
@rounds
def test_a_server_killed_while_it_starts_fails_the_start_and_is_named(make_gym, poll_s) -> None:
    gym = make_gym(poll_s=poll_s, servers={"answers": {"ready_after_s": 60}})
    traces = []

    def kill() -> None:
        while not (gym._deployment and gym._deployment.servers):
            time.sleep(0.01)
        traces.append(Trace(gym.run_id))
        os.kill(next(s.process.pid for s in gym._deployment.servers if s.name == "answers"), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(GymStartError, match="answers"):
        gym.start()
    killer.join()
    traces[0].gone_after()


@rounds
def test_a_stopped_server_is_named_by_health_within_its_deadline(make_gym) -> None:
    gym = make_gym().start()
    trace = Trace(gym.run_id)
    os.kill(server_process(gym, "answers"), signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(GymServerDied, match="did not answer within") as caught:
        gym.health(0.5)
    assert time.monotonic() - began < 1.0
    assert caught.value.component == "answers"
    gym.shutdown()
    trace.gone_after()


@pytest.mark.parametrize("victim", ["watch", "guard", "both"])
@rounds
def test_a_killed_guardian_is_noticed_and_nothing_is_left(make_gym, victim) -> None:
    gym = make_gym(daemons=3).start()
    trace = Trace(gym.run_id)
    watch, guard = guardians(gym.run_id)
    for name, pid in (("watch", watch), ("guard", guard)):
        if victim in (name, "both"):
            os.kill(pid, signal.SIGKILL)
    error = _named(gym, "gym", 2.0)
    assert "guardian" in str(error) or "ended" in str(error)
    if victim != "both":
        # The other one does it without being asked.
        trace_without_zombie = [line for line in trace.left() if f"process {watch} " not in line]
        deadline = time.monotonic() + 5
        while [line for line in trace.left() if f"process {watch} " not in line]:
            assert time.monotonic() < deadline, trace_without_zombie
            time.sleep(0.02)
    gym.shutdown()
    trace.gone_after()


@rounds
def test_stopped_guardians_do_not_keep_a_shutdown_from_ending(make_gym) -> None:
    gym = make_gym(shutdown_timeout_s=0.2).start()
    trace = Trace(gym.run_id)
    for pid in guardians(gym.run_id):
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    gym.shutdown()
    assert time.monotonic() - began < 6.0
    trace.gone_after()


@rounds
def test_guardians_without_descriptors_end_nothing_by_mistake_and_nothing_is_left(make_gym) -> None:
    gym = make_gym(shutdown_timeout_s=1.0).start()
    trace = Trace(gym.run_id)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for pid in guardians(gym.run_id):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
    # The guard looks for the trainer every half second.
    time.sleep(1.2)
    gym.health(5.0)
    gym.shutdown()
    trace.gone_after()


@rounds
def test_a_killed_command_is_reported_with_its_signal(make_gym) -> None:
    gym = make_gym().start()
    trace = Trace(gym.run_id)
    assert gym._deployment is not None
    assert gym._deployment.command is not None
    os.kill(gym._deployment.command.command_pid, signal.SIGKILL)
    error = _named(gym, "gym", 2.0)
    assert "SIGKILL" in str(error)
    with pytest.raises(GymServerDied):
        gym.health(1.0)
    gym.shutdown()
    trace.gone_after()


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("sleep", signal.SIGKILL),
        ("sleep", signal.SIGTERM),
        ("sleep", signal.SIGINT),
        ("sleep while starting", signal.SIGKILL),
        ("sleep while starting", signal.SIGINT),
        ("fork", signal.SIGKILL),
    ],
)
@rounds
def test_a_trainer_that_a_signal_ends_leaves_nothing(trainer, mode, number) -> None:
    program = trainer(mode)
    assert len(program.trace.pids) > 2
    if mode == "fork":
        program.process.send_signal(number)
        program.process.wait(20)
    else:
        program.kill(number)
    program.trace.gone_after()


@pytest.mark.parametrize("mode", ["exception", "os._exit", "sys.exit"])
@rounds
def test_a_trainer_that_ends_by_itself_leaves_nothing(trainer, mode) -> None:
    program = trainer(mode)
    _, said = program.process.communicate(timeout=20)
    assert program.process.returncode == (1 if mode == "exception" else 7), said
    assert ("the first error" in said) is (mode == "exception")
    program.trace.gone_after()


@pytest.mark.parametrize("mode", ["ignore SIGINT", "block signals", "ignore SIGCHLD"])
@rounds
def test_signal_settings_of_the_trainer_do_not_reach_gym(trainer, mode) -> None:
    program = trainer(mode)
    said, _ = program.process.communicate(timeout=20)
    assert program.process.returncode == 0
    # Gym's command reacted to SIGINT: nobody had to wait the 5 s that it has for that and kill it.
    assert float(said.split()[1]) < 4.5
    # And the guardian, which waits for children, had nothing to complain of.
    (complaints,) = program.folder.glob("gym-*/guardian.log")
    assert complaints.read_text() == ""
    program.trace.gone_after()


def test_a_start_in_a_thread_that_ends_is_no_end_of_gym(trainer) -> None:
    program = trainer("started in a thread that ended")
    # The guardian looks every half second.
    time.sleep(0.7)
    assert len(program.trace.left()) > 2
    program.kill()
    program.trace.gone_after()
