"""A Gym to break (see the double beside the bridge's own tests), and an eye on what is left of it."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_gym_bridge.config import NemoGymConfig
from rl_gym_bridge.interpreter import GymInterpreter
from rl_gym_bridge.process import GymProcess

HERE = Path(__file__).parent
DOUBLE = HERE.parents[2] / "packages" / "rl-gym-bridge" / "tests" / "doubles" / "gym_command.py"
WITHIN_S = 5.0
# How often each fault happens; a longer run sets the variable.
N = int(os.environ.get("RL_FAULTS_N", "1"))
# Most of a round is waiting for processes.
AT_A_TIME = 3
Test = Callable[..., None]


def rounds(test: Test) -> Test:
    """Run a test ``N`` times, some at the same time; the first failure comes out when all have ended."""

    @functools.wraps(test)
    def repeated(*arguments: object, **named: object) -> None:
        with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
            running = [pool.submit(test, *arguments, **named) for _ in range(N)]
        for each in running:
            each.result()

    repeated.rounds = N  # type: ignore[attr-defined]
    return repeated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        times = getattr(getattr(item, "function", None), "rounds", 1)
        item.user_properties.append(("rounds", times))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How often each fault happened, where the tier of faults was asked for."""
    if "faults" not in (config.option.markexpr or "") and config.option.verbose < 1:
        return
    happened: dict[str, collections.Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if report.when == "call" and "faults" in report.keywords:
                case = report.nodeid.partition("[")[0].rpartition("/")[2]
                times = int(dict(report.user_properties).get("rounds", 1))
                happened.setdefault(case, collections.Counter())[outcome] += times
    terminalreporter.section("how often each fault happened")
    for case, counts in sorted(happened.items()):
        failed = f", {counts['failed']} of them in a test that failed" if counts["failed"] else ""
        terminalreporter.write_line(f"{sum(counts.values()):5}  {case}{failed}")


def stat(pid: int) -> tuple[str, int, int, int] | None:
    """State, parent, session and start time, read without the code under test."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[3]), int(fields[19])


def processes_of(run_id: str) -> dict[int, int]:
    """Start time by process id of all that carries the run's id, is below such a one or in its session.

    Ray's processes give themselves titles, which overwrites their environment.
    """
    everyone = {int(entry): stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    mine = {pid: seen for pid, seen in everyone.items() if seen is not None}
    found: set[int] = set()
    for pid in mine:
        with contextlib.suppress(OSError):
            if f"RL_GYM_RUN_ID={run_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    grown = True
    while grown:
        sessions = {mine[pid][2] for pid in found}
        more = {pid for pid, seen in mine.items() if seen[1] in found or seen[2] in sessions} - found
        found |= more
        grown = bool(more)
    return {pid: mine[pid][3] for pid in found}


def listening() -> set[str]:
    """Inodes of all listening sockets of this machine."""
    lines = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines += Path("/proc/net", name).read_text().splitlines()[1:]
    return {fields[9] for fields in map(str.split, lines) if fields[3] == "0A"}


def sockets_of(pids: dict[int, int]) -> set[str]:
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{link}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    return inodes & listening()


class Trace:
    """What a run consisted of, to tell whether anything of it is left."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.pids: dict[int, int] = {}
        self.sockets: set[str] = set()
        self.look()

    def look(self) -> None:
        now = processes_of(self.run_id)
        self.pids.update(now)
        self.sockets |= sockets_of(now)

    def left(self) -> list[str]:
        """Processes, zombies included, and listening sockets of the run that are still there."""
        now = {**self.pids, **processes_of(self.run_id)}
        found = []
        for pid, started in now.items():
            seen = stat(pid)
            if seen is not None and seen[3] == started:
                found.append(f"process {pid} in state {seen[0]}")
        return found + [f"listening socket {inode}" for inode in self.sockets & listening()]

    def gone_after(self, within_s: float = WITHIN_S) -> float:
        """Seconds until nothing was left; fails if that takes longer than allowed."""
        began = time.monotonic()
        while left := self.left():
            if time.monotonic() - began > within_s:
                pytest.fail(f"after {within_s} s there are left: {left}")
            time.sleep(0.02)
        return time.monotonic() - began


@pytest.fixture
def interpreter() -> GymInterpreter:
    return GymInterpreter(Path(sys.executable), DOUBLE, "0.4.0", "3.12.0")


@pytest.fixture
def make_gym(tmp_path: Path, interpreter: GymInterpreter) -> Iterator[Callable[..., GymProcess]]:
    """Makes a supervised double; keywords are its misbehaviour, and those of the settings."""
    made = []

    def make(start_timeout_s: float = 30.0, shutdown_timeout_s: float = 1.5, **double: object) -> GymProcess:
        config = NemoGymConfig(
            "model",
            gym_config={"double": double},
            start_timeout_s=start_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
            work_dir=str(tmp_path),
        )
        gym = GymProcess(config, interpreter=interpreter, search_folder=tmp_path)
        made.append(gym)
        return gym

    yield make
    for each in made:
        each.shutdown()


def server_process(gym: GymProcess, name: str) -> int:
    """The process that serves: a shell that Gym starts becomes it or is its parent."""
    watched = gym.servers[name].process.pid
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (seen := stat(int(entry))) is not None and seen[1] == watched:
            return int(entry)
    return watched


def guardians(run_id: str) -> tuple[int, int]:
    """Process ids of the watch and of the guard below it."""
    seen = {pid: stat(pid) for pid in processes_of(run_id)}
    (watch,) = (
        pid
        for pid, now in seen.items()
        if now is not None
        and now[1] not in seen
        and now[2] == pid
        and b"guardian" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    (guard,) = (pid for pid, now in seen.items() if now is not None and now[1] == watch)
    return watch, guard


class Trainer:
    """Another program that uses Gym, and whose end is the test."""

    def __init__(self, folder: Path, mode: str, gym: str = str(DOUBLE)) -> None:
        self.folder = folder
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "trainer.py"), gym, str(folder), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("run "), (line, self.process.stderr and self.process.stderr.read())
        self.trace = Trace(line.split()[1])

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=20)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made = []
    numbers = itertools.count()

    def make(mode: str, **more: str) -> Trainer:
        program = Trainer(tmp_path / f"trainer{next(numbers)}", mode, **more)
        made.append(program)
        return program

    yield make
    for each in made:
        if each.process.poll() is None:
            each.kill()
