"""The leaf's and the bridge's wheels work in an environment that holds nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools.distributions import Distribution
from tools.interpreters import candidates, version_of

UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
#: What the bridge may bring with it: httpx and what httpx needs, on any Python.
HTTPX = {"httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi"}
HTTPX |= {"typing-extensions", "exceptiongroup"}
FORBIDDEN = ["torch", "ray", "transformers", "nemo_gym", "numpy", "vllm", "megatron", "tensorrt_llm"]

CHECK = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
loaded = sorted({forbidden!r} & {{name.partition(".")[0] for name in sys.modules}})
assert not loaded, f"loaded: {{loaded}}"
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def build(distribution: Distribution, folder: Path, out: Path) -> Path:
    """Build the wheel of a copy of `distribution` with the hatchling of this environment."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=folder)
    (wheel,) = out.glob(f"{distribution.import_name}-*.whl")
    return wheel


def empty_environment(folder: Path, python: str) -> Path:
    assert UV is not None, "uv is not in this environment"
    run(UV, "venv", "--quiet", "--no-python-downloads", "--python", python, folder, cwd=folder.parent)
    return folder / "bin" / "python"


def interpreter(version: tuple[int, ...]) -> str | None:
    """Return an interpreter of `version` on PATH or under pyenv, if there is one that starts."""
    found = candidates(".".join(map(str, version)))
    return next((python for python in found if version_of(python) == version), None)


@pytest.fixture
def wheels(
    members: dict[str, Distribution], copied_workspace: Path, tmp_path: Path
) -> Callable[..., list[Path]]:
    """Build the wheels of the named packages from the copy."""

    def make(*packages: str) -> list[Path]:
        return [
            build(members[name], copied_workspace / "packages" / members[name].name, tmp_path / "wheels")
            for name in packages
        ]

    return make


@pytest.mark.parametrize("version", ["minimum", "this"])
@pytest.mark.parametrize("packages", [("rl_actor_envs",), ("rl_actor_envs", "rl_gym_bridge")])
def test_a_wheel_imports_alone(
    members: dict[str, Distribution],
    wheels: Callable[..., list[Path]],
    tmp_path: Path,
    packages: tuple[str, ...],
    version: str,
) -> None:
    distribution = members[packages[-1]]
    minimum = distribution.minimum_python
    found = interpreter(minimum) if version == "minimum" else sys.executable
    if found is None:
        pytest.skip(f"no Python {'.'.join(map(str, minimum))} here")
    built = wheels(*packages)
    python = empty_environment(tmp_path / "empty", found)
    run(str(UV), "pip", "install", "--quiet", "--python", python, *built, cwd=tmp_path)
    check = CHECK.format(modules=distribution.modules(), forbidden=set(FORBIDDEN))
    run(python, "-I", "-W", "error", "-c", check, cwd=tmp_path)
    listed = run(str(UV), "pip", "list", "--format", "json", "--python", python, cwd=tmp_path)
    brought = {entry["name"] for entry in json.loads(listed)} - {name.replace("_", "-") for name in packages}
    assert brought <= (HTTPX if "rl_gym_bridge" in packages else set())
    for name in distribution.console_scripts:
        assert "usage:" in run(python.parent / name, "--help", cwd=tmp_path)
    names = ZipFile(built[-1]).namelist()
    assert f"{distribution.import_name}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_planted_dependency_fails_in_the_empty_environment(
    members: dict[str, Distribution],
    plant: Callable[[str, str], Path],
    wheels: Callable[..., list[Path]],
    tmp_path: Path,
) -> None:
    plant("rl_actor_envs", "import httpx")
    (wheel,) = wheels("rl_actor_envs")
    python = empty_environment(tmp_path / "empty", sys.executable)
    run(str(UV), "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)
    check = CHECK.format(modules=["rl_actor_envs"], forbidden=set(FORBIDDEN))
    with pytest.raises(AssertionError, match="No module named 'httpx'"):
        run(python, "-I", "-c", check, cwd=tmp_path)


def test_the_tables_script_runs_where_nothing_is_installed(
    members: dict[str, Distribution], tmp_path: Path
) -> None:
    script = tmp_path / "table.py"
    shutil.copy(members["rl_actor_envs"].package / "table.py", script)
    python = empty_environment(tmp_path / "empty", interpreter((3, 10)) or sys.executable)
    rows = run(python, "-I", script, cwd=tmp_path).splitlines()
    assert rows == sorted(rows)
    assert all(len(row.split("\t")) == 3 for row in rows)
