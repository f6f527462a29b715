from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rl_app_core.guardian import MARK, belonging_processes, guarded_children

SLEEPER = "import time; time.sleep(300)"
# A grandchild in a session of its own, whose parent has gone: nothing but the mark leads to it.
DETACHED = (
    "import subprocess, sys; "
    f"print(subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True, "
    "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
)


def detached_sleeper() -> int:
    done = subprocess.run(
        [sys.executable, "-c", DETACHED], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_the_end_of_the_block_ends_detached_grandchildren_and_the_scratch_folder(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    bystander = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        with guarded_children(scratch, wait_s=20):
            sleeper = detached_sleeper()
            assert belonging_processes(os.environ[MARK], str(scratch)) == [sleeper]
            assert alive(sleeper)
        assert gone_within(sleeper, 5)
        assert not scratch.exists()
        assert MARK not in os.environ
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_i8_a_driver_that_is_killed_takes_them_along(number, tmp_path):
    code = (
        "import pathlib, subprocess, sys, time\n"
        "from rl_app_core.guardian import guarded_children\n"
        f"with guarded_children(pathlib.Path({str(tmp_path / 'scratch')!r}), wait_s=20):\n"
        f"    done = subprocess.run([sys.executable, '-c', {DETACHED!r}], capture_output=True, text=True)\n"
        "    print(done.stdout, flush=True)\n"
        "    time.sleep(300)\n"
    )
    (tmp_path / "scratch").mkdir()
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    sleeper = int(driver.stdout.readline())
    driver.send_signal(number)
    driver.wait(10)
    driver.stdout.close()
    assert gone_within(sleeper, 10)
    deadline = time.monotonic() + 10
    while (tmp_path / "scratch").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (tmp_path / "scratch").exists()


def test_a_process_that_lost_its_mark_is_known_by_the_files_it_holds(tmp_path):
    """As Ray's agents: a process that sets its title overwrites what its environment was."""
    scratch, elsewhere = tmp_path / "scratch", tmp_path / "scratch-of-somebody-else"
    scratch.mkdir()
    elsewhere.mkdir()
    processes = []
    for folder in (scratch, elsewhere):
        with (folder / "agent.out").open("w") as output:
            processes.append(subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=output, env={}))
    agent, bystander = processes
    try:
        # The driver, this process, holds one as well, and must live through the end of the block.
        with (scratch / "driver.log").open("w"), guarded_children(scratch, wait_s=20):
            assert belonging_processes(os.environ[MARK], str(scratch)) == [agent.pid]
        assert agent.wait(5) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
