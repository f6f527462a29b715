"""Processes are told apart by id and start time, and the guardian needs no package."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rl_gym_bridge.supervision
from rl_gym_bridge.supervision.channel import Channel, send_message
from rl_gym_bridge.supervision.ending import end_all
from rl_gym_bridge.supervision.launch import GuardedCommand, GuardianFailed, described_status
from rl_gym_bridge.supervision.log_excerpt import excerpt, port_was_taken
from rl_gym_bridge.supervision.probing import Probe
from rl_gym_bridge.supervision.processes import descendants, is_same, of_run, process, send
from rl_gym_bridge.supervision.servers import BadList, parse_servers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def test_a_signal_meant_for_an_earlier_process_of_that_id_is_not_sent(sleeper) -> None:
    now = process(sleeper.pid)
    assert now is not None
    assert is_same(now)
    earlier = now._replace(started=now.started - 1)
    assert not is_same(earlier)
    assert not send(earlier, signal.SIGKILL)
    assert sleeper.poll() is None
    assert send(now, signal.SIGKILL)
    assert sleeper.wait(5) == -signal.SIGKILL


def test_a_zombie_does_not_run(sleeper) -> None:
    now = process(sleeper.pid)
    assert now is not None
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    zombie = process(sleeper.pid)
    assert zombie is not None
    assert (zombie.state, zombie.runs, is_same(now)) == ("Z", False, False)


def test_a_name_with_brackets_and_spaces_is_read(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "60"])
    try:
        deadline = time.monotonic() + 5
        while b"a) S" not in Path(f"/proc/{child.pid}/stat").read_bytes():
            assert time.monotonic() < deadline
        seen = process(child.pid)
        assert seen is not None
        assert (seen.pid, seen.parent) == (child.pid, os.getpid())
        assert seen.pid in {entry.pid for entry in descendants(os.getpid())}
    finally:
        child.kill()
        child.wait()


@pytest.mark.faults
def test_a_run_includes_those_that_lost_the_mark_and_their_parent() -> None:
    run_id = secrets.token_hex(8)
    # Another environment, another parent, the same session.
    script = "(env -u RL_GYM_RUN_ID sleep 60 & ) ; sleep 60"
    shell = subprocess.Popen(
        ["sh", "-c", script], env={**os.environ, "RL_GYM_RUN_ID": run_id}, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 5
        while len(found := of_run(run_id)) < 3:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        assert {entry.session for entry in found} == {shell.pid}
        assert os.getpid() not in {entry.pid for entry in found}
    finally:
        left = end_all(lambda: of_run(run_id), lambda: shell.poll(), polite_s=0.0, total_s=5)
        shell.wait()
    assert left == []
    assert of_run(run_id) == []


def test_what_cannot_be_seen_for_a_moment_is_looked_for_again(sleeper) -> None:
    looks = iter([OSError(24, "Too many open files")] * 3)

    def find() -> list:
        if (error := next(looks, None)) is not None:
            raise error
        now = process(sleeper.pid)
        return [] if now is None else [now]

    assert end_all(find, lambda: sleeper.poll(), polite_s=0.0, total_s=5) == []
    assert sleeper.poll() == -signal.SIGKILL
    looks = iter([OSError(24, "Too many open files")] * 100)
    with pytest.raises(OSError, match="Too many open files"):
        end_all(find, lambda: None, polite_s=0.0, total_s=0.1)


def test_the_guardian_loads_the_standard_library_only() -> None:
    folder = Path(rl_gym_bridge.supervision.__file__).parents[2]
    script = (
        "import sys, json; sys.path.append(sys.argv[1]); import rl_gym_bridge.supervision.guardian as g;"
        "loaded = {name.partition('.')[0] for name in sys.modules};"
        "print(json.dumps(sorted(loaded - sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(folder)]
    loaded = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert set(loaded) <= {"rl_gym_bridge", "__main__"}


def test_messages_arrive_whole_and_in_order() -> None:
    reading, writing = os.pipe()
    channel = Channel(reading)
    assert channel.read(0.0) == []
    os.write(writing, b'{"a": 1}\n{"b"')
    assert channel.read(1.0) == [{"a": 1}]
    os.write(writing, b": 2}\n")
    assert channel.read(1.0) == [{"b": 2}]
    os.close(writing)
    assert channel.read(1.0) == []
    assert channel.closed
    os.close(reading)
    reading, writing = os.pipe()
    os.close(reading)
    assert not send_message(writing, {"a": 1})
    os.close(writing)


def _guarded(tmp_path: Path, *command: str, remove: tuple[Path, ...] = ()) -> GuardedCommand:
    run_id = secrets.token_hex(8)
    return GuardedCommand(
        command,
        run_id=run_id,
        folder=tmp_path,
        environment={**os.environ, "RL_GYM_RUN_ID": run_id},
        log=tmp_path / "log",
        remove=remove,
        shutdown_timeout_s=2.0,
    )


@pytest.mark.faults
def test_a_guarded_command_reports_its_exit_and_its_files_go(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "file").write_text("x")
    guarded = _guarded(
        tmp_path, "sh", "-c", "echo said; sleep 60 & exit 3", remove=(private, tmp_path / "none")
    )
    deadline = time.monotonic() + 10
    while not guarded.problem():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert guarded.problem() == "the command ended with exit code 3"
    assert guarded.end(2.0) == []
    assert of_run(guarded.run_id) == []
    assert (tmp_path / "log").read_text() == "said\n"
    assert not private.exists()
    assert guarded.end(2.0) == []


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GuardianFailed, match="No such file"):
        _guarded(tmp_path, str(tmp_path / "missing"))


def test_exit_statuses_in_words() -> None:
    assert described_status(3) == "exit code 3"
    assert described_status(-9) == "signal SIGKILL"
    assert described_status(-99) == "signal 99"


def test_the_excerpt_of_a_log_has_what_tells_and_no_secret(tmp_path: Path) -> None:
    log = tmp_path / "log"
    noise = [f"(mcqa) INFO:     line {number}" for number in range(50)]
    lines = [
        "ValueError: early and telling",
        *noise,
        *(f"plain {number}" for number in range(40)),
        "api_key=abcdef",
    ]
    log.write_text("\n".join(lines))
    shown = excerpt(log)
    assert shown.splitlines()[0] == "ValueError: early and telling"
    assert "INFO" not in shown
    assert shown.splitlines()[-1] == "api_key=***"
    assert "plain 39" in shown
    assert "plain 10\n" not in shown
    assert excerpt(tmp_path / "none") == ""
    assert not port_was_taken(log)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"<html>", "no JSON"),
        (b'{"a": 1}', "no list"),
        (b"[1]", "no list"),
        (b'[{"process_name": "a", "pid": 1}]', "no address"),
        (b'[{"process_name": "a", "url": "http://127.0.0.1:1"}]', "no process"),
        (b'[{"process_name": "a", "url": "http://192.0.2.1:1", "pid": 1}]', "other machines"),
        (b'[{"process_name": "a", "url": "http://127.0.0.1:1", "pid": 4194304}]' * 1, ""),
    ],
)
def test_a_list_of_servers_that_cannot_be_used(body: bytes, problem: str) -> None:
    if not problem:
        (server,) = parse_servers(Probe(200, body, ""), "id")
        assert not server.runs
        return
    with pytest.raises(BadList, match=problem):
        parse_servers(Probe(200, body, ""), "id")


def test_a_list_is_empty_until_there_is_one() -> None:
    assert parse_servers(Probe(0, b"", "refuses connections"), "id") == ()
    assert parse_servers(Probe(200, b"[]", ""), "id") == ()
