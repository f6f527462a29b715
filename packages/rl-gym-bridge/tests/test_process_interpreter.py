"""Finding the interpreter that has Gym."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.interpreter import GymInterpreter, find_gym_interpreter


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder that looks like an environment with Gym; its interpreter tells what a real one would."""
    return _environment(tmp_path / "gym")


def _environment(root: Path, *, python=(3, 12, 1), version="0.4.0", found=True) -> Path:
    facts = {
        "python": list(python),
        "version": version,
        "prefix": str(root),
        "found": found,
        "checkout": False,
    }
    program = root / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport json; print(json.dumps({facts!r}))\n")
    program.chmod(0o755)
    (root / "bin" / "gym").write_text("#!/bin/sh\n")
    (root / "bin" / "gym").chmod(0o755)
    return root


def test_an_environment_or_its_interpreter_may_be_named(environment: Path) -> None:
    expected = GymInterpreter(environment / "bin/python", environment / "bin/gym", "0.4.0", "3.12.1")
    assert find_gym_interpreter(str(environment), environ={}) == expected
    assert find_gym_interpreter(str(environment / "bin/python"), environ={}) == expected
    assert find_gym_interpreter(None, environ={"RL_GYM_PYTHON": str(environment)}) == expected
    assert expected.release == (0, 4, 0)


def test_the_named_one_comes_before_the_variable(environment: Path, tmp_path: Path) -> None:
    other = _environment(tmp_path / "other", version="0.7.0rc1")
    found = find_gym_interpreter(str(other), environ={"RL_GYM_PYTHON": str(environment)})
    assert (found.version, found.release) == ("0.7.0rc1", (0, 7, 1))


def test_servers_beside_it_are_found(environment: Path) -> None:
    (environment / "servers").mkdir()
    assert find_gym_interpreter(str(environment), environ={}).servers == environment / "servers"


def test_without_any_the_error_says_how_to_get_one() -> None:
    with pytest.raises(GymConfigError, match="RL_GYM_PYTHON=GYM") as caught:
        find_gym_interpreter(None, environ={})
    assert "nemo-gym" in caught.value.remedy


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"python": (3, 11, 9)}, r"Python 3\.11\.9, and Gym needs 3\.12"),
        ({"version": ""}, "no package nemo-gym"),
        ({"found": False}, "no package nemo-gym"),
    ],
)
def test_an_interpreter_that_cannot_run_gym_is_refused(tmp_path: Path, facts: dict, problem: str) -> None:
    root = _environment(tmp_path / "gym", **facts)
    with pytest.raises(GymConfigError, match=problem) as caught:
        find_gym_interpreter(str(root), environ={})
    assert caught.value.address == str(root / "bin/python")


def test_what_is_no_interpreter_is_refused(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(GymConfigError, match="no such program"):
        find_gym_interpreter(str(tmp_path / "nowhere"), environ={})
    (environment / "bin/python").write_text("#!/bin/sh\necho secret_token=abcdefgh >&2; exit 3\n")
    with pytest.raises(GymConfigError, match=r"no Python \(exit code 3\) secret_token=\*\*\*"):
        find_gym_interpreter(str(environment), environ={})
    (environment / "bin/python").write_text("#!/bin/sh\necho 5\n")
    with pytest.raises(GymConfigError, match="no Python"):
        find_gym_interpreter(str(environment), environ={})


def test_gyms_command_must_be_beside_it(environment: Path) -> None:
    (environment / "bin/gym").unlink()
    with pytest.raises(GymConfigError, match="command gym is not there"):
        find_gym_interpreter(str(environment), environ={})


def test_one_that_hangs_meets_the_deadline(environment: Path) -> None:
    (environment / "bin/python").write_text("#!/bin/sh\nexec sleep 60\n")
    began = time.monotonic()
    with pytest.raises(GymConfigError, match=r"within 0\.3 s"):
        find_gym_interpreter(str(environment), environ={}, timeout_s=0.3)
    assert time.monotonic() - began < 20


def test_a_real_interpreter_without_gym_says_so() -> None:
    with pytest.raises(GymConfigError, match=r"Gym needs 3\.12|no package nemo-gym"):
        find_gym_interpreter(sys.executable, environ={})
