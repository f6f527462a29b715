"""Out of file descriptors, the bridge says that it cannot see; it calls nothing dead and forgets nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(120),
]

DOUBLE = Path(__file__).parent / "doubles" / "gym_command.py"

PREPARATION = """
import contextlib, os, resource, sys
from pathlib import Path
from rl_gym_bridge.config import NemoGymConfig
from rl_gym_bridge.failures import GymServerDied, GymStateUnknown
from rl_gym_bridge.interpreter import GymInterpreter
from rl_gym_bridge.process import GymProcess
from rl_gym_bridge.supervision.processes import is_same, process
from rl_gym_bridge.trajectory import FailureKind

@contextlib.contextmanager
def no_descriptor():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

def raised(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return error

def gym():
    config = NemoGymConfig(
        "model", gym_config={"double": {}}, shutdown_timeout_s=3.0, start_timeout_s=30.0, work_dir=sys.argv[2]
    )
    interpreter = GymInterpreter(Path(sys.executable), Path(sys.argv[1]), "0.4.0", "3.12.0")
    return GymProcess(config, interpreter=interpreter, search_folder=sys.argv[2])
"""


def _in_a_child(folder: Path, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PREPARATION + textwrap.dedent(script), str(DOUBLE), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_cannot_be_looked_at_is_not_gone(tmp_path: Path) -> None:
    _in_a_child(
        tmp_path,
        """
        own = process(os.getpid())
        with no_descriptor():
            errors = [raised(process, os.getpid()), raised(is_same, own)]
        assert [type(error) for error in errors] == [OSError] * 2, errors
        assert is_same(own)
        """,
    )


def test_servers_that_cannot_be_seen_are_not_dead_and_are_well_again_later(tmp_path: Path) -> None:
    _in_a_child(
        tmp_path,
        """
        with gym() as running:
            with no_descriptor():
                errors = [raised(running.check), raised(running.health, 1.0)]
            assert [type(error) for error in errors] == [GymStateUnknown] * 2, errors
            assert all(error.kind is FailureKind.INFRA for error in errors)
            assert "cannot tell whether it runs: Too many open files" in str(errors[0])
            running.check()
            running.health(5.0)
            # What is known to be dead is said even then.
            os.kill(running._deployment.command.command_pid, 9)
            while not running._deployment.command.problem():
                pass
            with no_descriptor():
                error = raised(running.check)
            assert type(error) is GymServerDied, error
        """,
    )


def test_a_shutdown_ends_everything_all_the_same(tmp_path: Path) -> None:
    _in_a_child(
        tmp_path,
        """
        running = gym().start()
        servers = [server.process for server in running.servers.values()]
        assert len(servers) == 3
        with no_descriptor():
            running.shutdown()
        assert not any(map(is_same, servers))
        """,
    )


def test_a_start_says_what_it_could_not_see(tmp_path: Path) -> None:
    _in_a_child(
        tmp_path,
        """
        from rl_gym_bridge.failures import GymStartError
        with no_descriptor():
            error = raised(gym().start)
        assert type(error) is GymStartError, error
        assert "Too many open files" in str(error)
        """,
    )


def test_a_guard_does_not_take_a_trainer_that_it_cannot_see_for_gone(tmp_path: Path) -> None:
    _in_a_child(
        tmp_path,
        """
        from rl_gym_bridge.supervision.channel import Channel
        from rl_gym_bridge.supervision.guardian import _Guard
        own = process(os.getpid())
        guard = _Guard({"trainer": [own.pid, own.started]}, Channel(0), os.getppid())
        with no_descriptor():
            assert not guard._trainer_is_gone()
        assert not guard._trainer_is_gone()
        assert _Guard({"trainer": [own.pid, own.started - 1]}, Channel(0), os.getppid())._trainer_is_gone()
        """,
    )
