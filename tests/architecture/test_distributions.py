"""Every distribution is complete, declares what it imports, and is known to the front door."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.checks.completeness import incomplete
from tools.distributions import Distribution, distributions

NAMES = [item.name for item in distributions(Path(__file__).resolve().parents[2])]


def undeclared(folder: Path, own: str) -> str:
    """Return what deptry says about the imports and declarations of the distribution in `folder`, or ''."""
    done = subprocess.run(
        [sys.executable, "-m", "deptry", "src", "--no-ansi", "--known-first-party", own],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr if done.returncode else ""


def test_every_distribution_is_complete(root: Path) -> None:
    assert incomplete(root) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("README.md", "no README.md"),
        ("CHANGELOG.md", "no CHANGELOG.md"),
        ("LICENSE", "no LICENSE"),
        ("src/rl_gym_bridge/py.typed", "no py.typed"),
        ("src/rl_gym_bridge/_version.py", "no version"),
    ],
)
def test_a_missing_file_is_seen(copied_workspace: Path, name: str, complaint: str) -> None:
    (copied_workspace / "packages" / "rl-gym-bridge" / name).unlink()
    assert any(line.startswith(f"rl-gym-bridge: {complaint}") for line in incomplete(copied_workspace))


def test_a_version_without_changelog_entry_is_seen(copied_workspace: Path) -> None:
    version = copied_workspace / "packages" / "rl-gym-bridge" / "src" / "rl_gym_bridge" / "_version.py"
    version.write_text('__version__ = "9.9.9"\n')
    assert "rl-gym-bridge: no CHANGELOG.md entry for 9.9.9" in incomplete(copied_workspace)


@pytest.mark.parametrize("name", NAMES)
def test_declared_and_imported_agree(members: dict[str, Distribution], name: str) -> None:
    distribution = members[name.replace("-", "_")]
    assert undeclared(distribution.folder, distribution.import_name) == ""


def test_an_undeclared_import_is_seen(plant: Callable[[str, str], Path]) -> None:
    copy = plant("rl_gym_bridge.planted", "import typer")
    assert "DEP001 'typer'" in undeclared(copy / "packages" / "rl-gym-bridge", "rl_gym_bridge") or (
        "DEP003 'typer'" in undeclared(copy / "packages" / "rl-gym-bridge", "rl_gym_bridge")
    )


def test_an_unused_declaration_is_seen(copied_workspace: Path) -> None:
    declaration = copied_workspace / "packages" / "rl-actor-envs" / "pyproject.toml"
    text = declaration.read_text()
    declaration.write_text(text.replace("dependencies = [", 'dependencies = ["httpx>=0.27",', 1))
    assert "DEP002 'httpx'" in undeclared(declaration.parent, "rl_actor_envs")


def test_the_environment_holds_every_distribution(root: Path) -> None:
    environment = tomllib.loads((root / "hatch.toml").read_text())["envs"]["default"]
    folders = {str(item.folder.relative_to(root)) for item in distributions(root)}
    assert {member["path"] for member in environment["workspace"]["members"]} == folders
    sources = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    assert set(sources) == set(NAMES)


def test_every_console_script_has_a_hatch_script_that_runs_it(root: Path) -> None:
    scripts = tomllib.loads((root / "hatch.toml").read_text())["envs"]["default"]["scripts"]
    commands = {
        command for item in distributions(root) for command in item.declaration["project"].get("scripts", {})
    }
    assert commands
    assert [
        command
        for command in commands
        if not re.fullmatch(rf"exec {command}( run)? {{args}}", scripts.get(command, ""))
    ] == []
