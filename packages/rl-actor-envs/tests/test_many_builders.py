"""Many processes that want one environment, and builders that die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rl_actor_envs.errors import LockTimeoutError
from rl_actor_envs.locking import BuildLock

PROCESSES = 24
DEPENDENCIES, MEMBERS = " pip sync ", " pip install "


def results(processes: list[subprocess.Popen[str]]) -> set[str]:
    """What the processes printed; all of them have to succeed."""
    said = [process.communicate(timeout=120) for process in processes]
    assert [(process.returncode, err) for process, (_, err) in zip(processes, said, strict=True)] == [
        (0, "") for _ in processes
    ]
    return {out.strip() for out, _ in said}


def check(mini: Any, root: str) -> None:
    """The environment is complete and holds nothing else."""
    environment = mini.only_environment()
    assert str(environment) == root
    assert mini.installed(environment) == {"tiny": "1.0", "mini_core": "0.1.0", "mini_library": "0.1.0"}
    assert not list(environment.rglob("rubbish"))
    assert [path.name for path in environment.glob("*.json")] == ["environment.json"]
    json.loads((environment / "environment.json").read_text())
    done = subprocess.run(
        [environment / "bin" / "python", "-I", "-c", "import mini_core, tiny"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def holds_lock_file(pid: int) -> bool:
    """Whether a process has the file open that builders wait for."""
    opened = [os.path.realpath(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    return any(path.endswith(".lock") for path in opened)


def test_many_processes_share_one_installation(mini: Any) -> None:
    hold = mini.hold("venv --no-project")
    processes = [mini.ask() for _ in range(PROCESSES)]
    # All of them have come to the lock before the first has installed anything.
    mini.wait_for(lambda: all(holds_lock_file(process.pid) for process in processes))
    mini.wait_for(hold.with_suffix(".held").exists)
    hold.unlink()
    (root,) = results(processes)
    check(mini, root)
    counts = {words: mini.calls(words) for words in (" venv ", DEPENDENCIES, MEMBERS)}
    assert counts == {" venv ": 1, DEPENDENCIES: 1, MEMBERS: 1}


@pytest.mark.parametrize("phase", [DEPENDENCIES, MEMBERS])
@pytest.mark.parametrize("child", ["dies too", "goes on"])
def test_a_builder_killed_half_way_loses_nobody_but_itself(phase: str, child: str, mini: Any) -> None:
    # Half-way: something is in the environment, and uv stands still before the rest.
    spoil = f"for site in {mini.environments}/*/lib/*/site-packages; do touch $site/rubbish; done"
    hold = mini.hold(phase.strip(), spoil)
    held = hold.with_suffix(".held")
    builder = mini.ask()
    mini.wait_for(held.exists)
    others = [mini.ask() for _ in range(5)]
    uv = int(held.read_text())
    os.kill(builder.pid, signal.SIGKILL)
    builder.communicate(timeout=60)
    if child == "dies too":
        os.kill(uv, signal.SIGKILL)
    else:
        # As long as it may still write, nobody else builds and nobody is told that all is well.
        calls = mini.calls("")
        with pytest.raises(subprocess.TimeoutExpired):
            others[0].wait(timeout=1)
        assert (mini.calls(""), [other.poll() for other in others]) == (calls, [None] * len(others))
        hold.unlink()
    (root,) = results(others)
    check(mini, root)
    assert builder.returncode == -signal.SIGKILL
    # What the dead one had begun was not used, and the others did it once.
    assert mini.calls(DEPENDENCIES) == 2
    assert mini.calls(MEMBERS) == (2 if phase == MEMBERS else 1)


def test_what_a_builder_left_that_was_killed_while_clearing_up_is_cleared_up(mini: Any) -> None:
    hold = mini.hold("pip sync")
    builder = mini.ask()
    mini.wait_for(hold.with_suffix(".held").exists)
    os.kill(builder.pid, signal.SIGKILL)
    os.kill(int(hold.with_suffix(".held").read_text()), signal.SIGKILL)
    builder.communicate(timeout=60)
    environment = mini.only_environment()
    # The remover got as far as the interpreter.
    (environment / "bin" / "python").unlink()
    (environment / "pyvenv.cfg").unlink()
    (root,) = results([mini.ask()])
    check(mini, root)


def test_who_waits_too_long_is_told_for_whom_and_where(mini: Any) -> None:
    hold = mini.hold("pip sync")
    builder = mini.ask()
    mini.wait_for(hold.with_suffix(".held").exists)
    waiter = mini.ask(RL_ACTOR_ENVS_BUILD_TIMEOUT_S="0.5")
    _, err = waiter.communicate(timeout=60)
    assert waiter.returncode == 1
    words = err.splitlines()[-1]
    lock = f"{mini.only_environment()}.lock"
    for part in (
        "LockTimeoutError: waited 0.5 s",
        lock,
        f"process {builder.pid} holds",
        "RL_ACTOR_ENVS_BUILD_TIMEOUT_S",
    ):
        assert part in words
    # The builder's own deadline is another matter.
    os.kill(builder.pid, signal.SIGKILL)
    builder.communicate(timeout=60)
    orphan = mini.ask(RL_ACTOR_ENVS_BUILD_TIMEOUT_S="0.5")
    _, err = orphan.communicate(timeout=60)
    assert f"a child of process {builder.pid}, which has ended," in err
    hold.unlink()
    (root,) = results([mini.ask()])
    check(mini, root)


@pytest.mark.parametrize("fails", [False, True])
def test_the_lock_is_free_after_a_success_and_after_a_failure_when_every_child_has_ended(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_BUILD_TIMEOUT_S", "0.2")
    path = str(tmp_path / "x.lock")
    with contextlib.suppress(ZeroDivisionError), BuildLock(path) as lock:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(lock.fd,))
        if fails:
            raise ZeroDivisionError
    try:
        if fails:
            with pytest.raises(LockTimeoutError), BuildLock(path):
                pass
        else:
            with BuildLock(path):
                pass
    finally:
        child.kill()
        child.wait(timeout=60)
    with BuildLock(path):
        pass


def test_an_interrupted_builder_ends_its_uv(mini: Any) -> None:
    hold = mini.hold("pip sync")
    builder = mini.ask()
    mini.wait_for(hold.with_suffix(".held").exists)
    uv = int(hold.with_suffix(".held").read_text())
    builder.send_signal(signal.SIGINT)
    builder.communicate(timeout=60)
    mini.wait_for(lambda: not Path(f"/proc/{uv}").exists())
    (root,) = results([mini.ask()])
    check(mini, root)
