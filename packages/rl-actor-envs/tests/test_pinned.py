"""Environments from a file of hashed versions, for a Python that is not the running one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_actor_envs.errors import BuildError, UvError
from rl_actor_envs.pinned import PinnedEnvironment, build_pinned, find_pinned, pinned_environment

BUILD = """
import sys
from rl_actor_envs.pinned import build_pinned, pinned_environment
environment = pinned_environment("gym", sys.argv[1], python=sys.executable, directory=sys.argv[2])
print(build_pinned(environment), environment.root)
"""


@pytest.fixture
def mini(mini: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    mini.apply(monkeypatch)
    return mini


@pytest.fixture
def pins(mini: Any) -> Path:
    (wheel,) = mini.index.rglob("tiny-1.0-*.whl")
    path = mini.folder / "pins.txt"
    path.write_text(f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return path


def gym(mini: Any, pins: Path) -> PinnedEnvironment:
    return pinned_environment("gym", pins, python=sys.executable, directory=mini.environments)


def held(environment: PinnedEnvironment) -> set[str]:
    return {path.name for path in Path(environment.root).glob("*.json")}


def test_it_holds_the_pinned_versions_and_is_built_once(mini: Any, pins: Path) -> None:
    environment = gym(mini, pins)
    assert find_pinned("gym", pins, mini.environments) is None
    assert build_pinned(environment) is True
    assert mini.installed(Path(environment.root)) == {"tiny": "1.0"}
    calls = mini.calls("")
    assert build_pinned(gym(mini, pins)) is False
    assert mini.calls("") == calls
    assert find_pinned("gym", pins, mini.environments) == environment.root
    assert held(environment) == {"environment.json"}


def test_what_finishes_it_is_part_of_the_build(mini: Any, pins: Path) -> None:
    def fails(_: PinnedEnvironment, lock: int) -> None:
        raise RuntimeError("no servers")

    environment = gym(mini, pins)
    with pytest.raises(RuntimeError, match="no servers"):
        build_pinned(environment, finish=fails)
    assert not environment.is_complete()
    assert find_pinned("gym", pins, mini.environments) is None
    places: list[str] = []
    assert build_pinned(environment, finish=lambda made, _: places.append(made.root)) is True
    assert places == [environment.root]


def test_other_versions_and_programs_have_other_places(mini: Any, pins: Path) -> None:
    first = gym(mini, pins)
    build_pinned(first)
    pins.write_text(f"# changed\n{pins.read_text()}")
    assert gym(mini, pins).root != first.root
    assert find_pinned("gym", pins, mini.environments) is None
    other = pinned_environment("other", pins, python=sys.executable, directory=mini.environments)
    assert other.root != gym(mini, pins).root


def test_a_wrong_hash_is_not_installed(mini: Any, pins: Path) -> None:
    pins.write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    environment = gym(mini, pins)
    with pytest.raises(UvError, match=r"(?i)hash"):
        build_pinned(environment)
    assert not environment.is_complete()


def test_versions_that_change_meanwhile_are_noticed(mini: Any, pins: Path) -> None:
    environment = gym(mini, pins)
    with pytest.raises(BuildError, match="changed meanwhile"):
        build_pinned(environment, finish=lambda *_: pins.write_text(f"{pins.read_text()}# more\n"))
    assert not environment.is_complete()


def test_what_somebody_else_made_is_kept(mini: Any, pins: Path) -> None:
    environment = gym(mini, pins)
    precious = Path(environment.root, "precious")
    precious.parent.mkdir(parents=True)
    precious.touch()
    with pytest.raises(BuildError, match="was not built here"):
        build_pinned(environment)
    assert precious.exists()


@pytest.mark.parametrize("name", ["building.json.17", "building.json.4194304"])
def test_a_builder_that_was_killed_over_its_first_mark_is_taken_over(
    mini: Any, pins: Path, name: str
) -> None:
    environment = gym(mini, pins)
    Path(environment.root).mkdir(parents=True)
    Path(environment.root, name).write_text("{")
    assert build_pinned(environment) is True
    assert not Path(environment.root, name).exists()


@pytest.mark.parametrize("name", ["building.json.bak", "mine.json.17", "building.json."])
def test_a_name_that_only_looks_like_an_unfinished_mark_is_somebody_elses(
    mini: Any, pins: Path, name: str
) -> None:
    environment = gym(mini, pins)
    Path(environment.root).mkdir(parents=True)
    for entry in (name, "building.json.17"):
        Path(environment.root, entry).write_text("{")
    with pytest.raises(BuildError, match="was not built here"):
        build_pinned(environment)
    assert Path(environment.root, name).exists()


def test_a_builder_of_actors_environments_killed_over_its_first_mark_is_taken_over(
    mini: Any, tmp_path: Path
) -> None:
    place = tmp_path / "driver"
    place.mkdir()
    (place / "building.json.17").write_text("{")
    done = mini.cli("driver", str(place), "--phase", "dependencies")
    assert done.returncode == 0, done.stderr + done.stdout
    assert not (place / "building.json.17").exists()


def test_what_finishes_it_is_part_of_its_identity(mini: Any, pins: Path, tmp_path: Path) -> None:
    script = tmp_path / "finish.py"
    script.write_text("1")

    def wanted() -> PinnedEnvironment:
        return pinned_environment(
            "gym", pins, python=sys.executable, directory=mini.environments, also=[script]
        )

    first = wanted()
    assert first.root != gym(mini, pins).root
    build_pinned(first)
    assert find_pinned("gym", pins, mini.environments, also=[script]) == first.root
    assert find_pinned("gym", pins, mini.environments) is None
    script.write_text("2")
    assert wanted().root != first.root
    assert find_pinned("gym", pins, mini.environments, also=[script]) is None
    with pytest.raises(BuildError, match=r"finish\.py changed meanwhile"):
        build_pinned(wanted(), finish=lambda *_: script.write_text("3"))
    script.unlink()
    with pytest.raises(BuildError, match=r"finish\.py, cannot be read"):
        wanted()


def test_a_process_that_finishes_it_can_keep_other_builders_out(mini: Any, pins: Path) -> None:
    environment = gym(mini, pins)
    left: list[subprocess.Popen[bytes]] = []

    def stays(_: PinnedEnvironment, lock: int) -> None:
        left.append(subprocess.Popen(["sleep", "60"], pass_fds=(lock,)))
        raise RuntimeError("the builder ends")

    with pytest.raises(RuntimeError, match="the builder ends"):
        build_pinned(environment, finish=stays)
    other = mini.start("-c", BUILD, str(pins), str(mini.environments))
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            other.communicate(timeout=2)
    finally:
        left[0].kill()
        left[0].wait()
    assert other.communicate(timeout=60)[0].startswith("True")


def test_a_lost_interpreter_is_made_again(mini: Any, pins: Path) -> None:
    environment = gym(mini, pins)
    build_pinned(environment)
    os.unlink(environment.interpreter)
    assert find_pinned("gym", pins, mini.environments) is None
    assert build_pinned(environment) is True
    assert Path(environment.interpreter).exists()


def test_a_killed_builder_is_taken_over_and_many_share_one_build(mini: Any, pins: Path) -> None:
    hold = mini.hold("pip sync")
    words = ("-c", BUILD, str(pins), str(mini.environments))
    first = mini.start(*words)
    mini.wait_for(lambda: hold.with_suffix(".held").exists())
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    others = [mini.start(*words) for _ in range(6)]
    hold.unlink()
    answers = [process.communicate(timeout=120) for process in others]
    assert [process.returncode for process in others] == [0] * 6, answers
    assert sorted(out.split()[0] for out, _ in answers) == ["False"] * 5 + ["True"]
    environment = gym(mini, pins)
    assert environment.is_complete()
    assert json.loads(Path(environment.root, "environment.json").read_text())["program"] == "gym"
    # The dead builder's uv and the next one's.
    assert mini.calls("pip sync") == 2


@pytest.mark.parametrize(
    ("python", "problem"), [("no-such-python", "does not run"), ("/bin/false", "does not run")]
)
def test_a_python_that_does_not_run_is_named(mini: Any, pins: Path, python: str, problem: str) -> None:
    with pytest.raises(BuildError, match=problem):
        pinned_environment("gym", pins, python=python, directory=mini.environments)


def test_pins_that_cannot_be_read_are_named(mini: Any) -> None:
    with pytest.raises(BuildError, match="nowhere"):
        pinned_environment("gym", "nowhere.txt", python=sys.executable, directory=mini.environments)


def test_the_interpreter_runs_what_is_in_it(mini: Any, pins: Path) -> None:
    environment = gym(mini, pins)
    build_pinned(environment)
    words = [environment.interpreter, "-I", "-c", "import tiny; print(tiny.VERSION)"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1.0\n"
