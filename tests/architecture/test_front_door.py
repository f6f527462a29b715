"""The README's two commands, the script behind them, and CI say the same thing."""

from __future__ import annotations

import fcntl
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import bootstrap, vllm_environment


def commands(readme: str) -> list[str]:
    """Return the lines of the shell blocks of a document."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_readme_gives_exactly_two_commands(root: Path) -> None:
    run, test = commands((root / "README.md").read_text())
    scripts = tomllib.loads((root / "hatch.toml").read_text())["envs"]["default"]["scripts"]
    assert (run, test) == ("./hatch run grpo", "./hatch run test")
    assert scripts["grpo"] == "exec grpo run {args}"
    assert re.fullmatch(r"pytest .*{args}", scripts["test"])


def test_ci_runs_the_readmes_test_command(root: Path) -> None:
    _, test = commands((root / "README.md").read_text())
    lines = (root / ".ci" / "run").read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert lines[-1] == f"exec {test}"


def test_the_front_door_is_executable(root: Path) -> None:
    assert (root / "hatch").stat().st_mode & 0o111 == 0o111


def test_the_front_door_says_what_it_needs(root: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", str(root / "hatch"), "--version"],
        env={"PATH": "nowhere"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr == "hatch: python3.11 is not on PATH; install Python 3.11 and try again\n"


def test_the_pins_of_the_front_door_are_the_workspaces(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    boot = dict(pin.split("==") for pin in settings["dependency-groups"]["boot"])
    assert settings["tool"]["uv"]["required-version"] == f"=={boot['uv']}"
    assert f"uv=={boot['uv']}" in settings["dependency-groups"]["dev"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "requirements").mkdir()
    for pins in {pins for made_from in bootstrap.ENVIRONMENTS.values() for pins in made_from}:
        (tmp_path / "requirements" / pins).write_text("a==1\n")
    (tmp_path / ".hatch").mkdir()
    for name in bootstrap.ENVIRONMENTS:
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    return tmp_path


def keep_or_drop(checkout: Path) -> list[str]:
    """Start the front door's check of all environments; return those that are left, and put all back."""
    for name in bootstrap.ENVIRONMENTS:
        bootstrap.drop_stale_environment(checkout, checkout / ".hatch", name)
    left = [name for name in bootstrap.ENVIRONMENTS if (checkout / name).exists()]
    for name in bootstrap.ENVIRONMENTS:
        (checkout / name / "bin").mkdir(parents=True, exist_ok=True)
        (checkout / name / "bin" / "python").touch()
    return left


def test_every_environment_is_watched_with_all_that_it_is_installed_from(root: Path) -> None:
    declared = tomllib.loads((root / "hatch.toml").read_text())["envs"]
    watched = {
        environment["path"]: {
            Path(environment["env-vars"][name]).name
            for name in ("UV_CONSTRAINT", "UV_OVERRIDE")
            if name in environment["env-vars"]
        }
        for environment in declared.values()
    }
    assert watched == {name: set(pins) for name, pins in bootstrap.ENVIRONMENTS.items()}


def test_an_environment_lives_as_long_as_its_pins(checkout: Path) -> None:
    assert keep_or_drop(checkout) == [], "an environment of unknown pins is not kept"
    assert keep_or_drop(checkout) == [*bootstrap.ENVIRONMENTS]


@pytest.mark.parametrize(
    ("pins", "dropped"), [("dev.txt", ".venv"), ("vllm.txt", ".venv-vllm"), ("overrides.txt", ".venv-vllm")]
)
def test_changed_pins_drop_the_environment_that_they_belong_to_and_no_other(
    checkout: Path, pins: str, dropped: str
) -> None:
    keep_or_drop(checkout)
    (checkout / "requirements" / pins).write_text("a==2\n")
    assert keep_or_drop(checkout) == [name for name in bootstrap.ENVIRONMENTS if name != dropped]


@pytest.mark.parametrize("name", bootstrap.ENVIRONMENTS)
def test_an_environment_without_interpreter_is_removed(checkout: Path, name: str) -> None:
    keep_or_drop(checkout)
    (checkout / name / "bin" / "python").unlink()
    (checkout / name / "bin" / "python").symlink_to(checkout / "gone")
    assert name not in keep_or_drop(checkout)


@pytest.fixture
def vllm(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A complete `.venv-vllm` and the installations of it from now on."""
    (checkout / "hatch.toml").write_text("[envs.vllm]\n")
    (checkout / "packages" / "one").mkdir(parents=True)
    (checkout / "packages" / "one" / "pyproject.toml").write_text("[project]\n")
    installed: list[Path] = []
    monkeypatch.setattr(vllm_environment, "install", installed.append)
    vllm_environment.vllm_python(checkout)
    assert installed.pop() == checkout
    return installed


def test_a_complete_environment_is_not_installed_again(checkout: Path, vllm: list[Path]) -> None:
    assert vllm_environment.vllm_python(checkout) == checkout / ".venv-vllm" / "bin" / "python"
    assert vllm == []


@pytest.mark.parametrize(
    "changed",
    ["requirements/vllm.txt", "requirements/overrides.txt", "hatch.toml", "packages/one/pyproject.toml"],
)
def test_an_environment_that_something_has_changed_for_is_not_complete(
    checkout: Path, vllm: list[Path], changed: str
) -> None:
    (checkout / changed).write_text("# changed\n")
    vllm_environment.vllm_python(checkout)
    assert vllm == [checkout]


def test_an_installation_that_fails_is_tried_again(
    checkout: Path, vllm: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a front door that leaves half of the environment behind."""
    monkeypatch.undo()
    (checkout / ".venv-vllm" / "bin" / "python").unlink()
    (checkout / "hatch").write_text(
        "#!/bin/sh\nmkdir -p .venv-vllm/bin\ntouch .venv-vllm/bin/python\nexit 7\n"
    )
    (checkout / "hatch").chmod(0o755)
    for _ in range(2):
        with pytest.raises(vllm_environment.NoEnvironmentError, match="could not be installed"):
            vllm_environment.vllm_python(checkout)
    (checkout / "hatch").write_text("#!/bin/sh\nexit 0\n")
    vllm_environment.vllm_python(checkout)


def test_two_commands_do_not_install_at_once(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "LOCK_TIMEOUT_S", 0.3)
    lock = checkout / ".hatch" / "lock"
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(bootstrap.BootstrapError, match="another command"), bootstrap.exclusive(lock):
            pass
    with bootstrap.exclusive(lock):
        pass


def test_a_failing_install_leaves_no_finished_front_door(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "requirements" / "boot.txt").write_text("hatch==1\n")

    def fail(command: list[str]) -> None:
        raise bootstrap.BootstrapError("`pip` ended with 1")

    monkeypatch.setattr(bootstrap, "run", fail)
    with pytest.raises(bootstrap.BootstrapError):
        bootstrap.install_front_door(checkout, checkout / ".hatch")
    assert not (checkout / ".hatch" / "boot.key").exists()


def test_a_python_without_pip_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "requirements" / "boot.txt").write_text("hatch==1\n")
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bootstrap.BootstrapError, match=r"install python3\.11-venv"):
        bootstrap.install_front_door(checkout, checkout / ".hatch")


def test_hatch_keeps_its_files_in_the_checkout(checkout: Path) -> None:
    state = checkout / ".hatch"
    found = bootstrap.environment(
        state, {"PIP_INDEX_URL": "https://mirror.example/simple", "HATCH_PYTHON": "x"}
    )
    assert {name: found[name] for name in found if name.startswith("HATCH_")} == {
        "HATCH_DATA_DIR": str(state / "data"),
        "HATCH_CACHE_DIR": str(state / "cache"),
        "HATCH_CONFIG": str(state / "config.toml"),
        "HATCH_PYTHON": "x",
    }
    assert found["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert "UV_DEFAULT_INDEX" not in bootstrap.environment(state, {"UV_INDEX_URL": "u", "PIP_INDEX_URL": "p"})


def test_braces_of_a_setting_pass_through_the_front_door(root: Path) -> None:
    """hatch formats what it is given to run; a YAML mapping or a prompt template must arrive as written."""
    setting = 'data.train.options={min_terms: 2, operators: ["+"]}'
    shown = subprocess.run(
        ["./hatch", "run", "python", "-c", "import sys; print(sys.argv[1:])", setting, "a {question} b {}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert shown.stdout.strip().splitlines()[-1] == repr([setting, "a {question} b {}"])


def test_a_checkout_where_uv_cannot_read_is_refused() -> None:
    bootstrap.check_location(Path("/somewhere/checkout"))
    with pytest.raises(bootstrap.BootstrapError, match=r"has a blank in it .*move it and try again"):
        bootstrap.check_location(Path("/some where/checkout"))


@pytest.mark.parametrize("name", bootstrap.ENVIRONMENTS)
def test_a_moved_checkout_is_installed_anew(tmp_path: Path, name: str) -> None:
    for place in ("first", "second"):
        (tmp_path / place / "requirements").mkdir(parents=True)
        for pins in bootstrap.ENVIRONMENTS[name]:
            (tmp_path / place / "requirements" / pins).write_text("pins\n")
        (tmp_path / place / name / "bin").mkdir(parents=True)
        (tmp_path / place / name / "bin" / "python").touch()
        (tmp_path / place / ".hatch").mkdir()
    first, second = tmp_path / "first", tmp_path / "second"
    bootstrap.drop_stale_environment(first, first / ".hatch", name)
    for stamp in (first / ".hatch").iterdir():
        (second / ".hatch" / stamp.name).write_text(stamp.read_text())
    bootstrap.drop_stale_environment(second, second / ".hatch", name)
    assert not (second / name).exists()


def test_hatchs_environments_differ_in_where_they_are_installed_from_alone(root: Path) -> None:
    # Hatch does not merge this table with the template's: what is not repeated is not set.
    environments = tomllib.loads((root / "hatch.toml").read_text())["envs"]
    of_their_own = {"UV_CONSTRAINT", "UV_OVERRIDE"}
    default, vllm = (
        {name: value for name, value in environments[which]["env-vars"].items() if name not in of_their_own}
        for which in ("default", "vllm")
    )
    assert default == vllm
