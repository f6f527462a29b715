"""Format, lint and types are clean, and each tool is able to say no."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

#: Pyrefly runs twice: the two distributions that support an older Python are checked against that one too.
COMMANDS = {
    "format": ["ruff", "format", "--check", "--no-cache", "."],
    "lint": ["ruff", "check", "--no-cache", "."],
    "types": ["pyrefly", "check", "--output-format", "min-text"],
    "types-3.10": ["pyrefly", "check", "--output-format", "min-text", "--python-version", "3.10"],
}
OLDER_PYTHON = ["packages/rl-actor-envs/src", "packages/rl-gym-bridge/src"]


def check(name: str, root: Path, *parts: str) -> tuple[int, str]:
    """Run one of COMMANDS in `root` (Pyrefly on `parts` of it, if given); return exit code and output."""
    tool, *arguments = COMMANDS[name]
    executable = shutil.which(tool, path=str(Path(sys.executable).parent))
    assert executable is not None, f"{tool} is not in this environment"
    if tool == "pyrefly":
        arguments += ["--python-interpreter-path", sys.executable]
        arguments += OLDER_PYTHON if name == "types-3.10" else parts
    done = subprocess.run(
        [executable, *arguments],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_workspace_is_clean(root: Path, name: str) -> None:
    code, output = check(name, root)
    assert code == 0, output


@pytest.mark.parametrize(
    ("name", "line", "complaint"),
    [
        ("format", "x = {  'a':1 }", "would be reformatted"),
        ("lint", "import json", "F401"),
        ("lint", "print('hello')", "T201"),
        ("types", "x: int = 'one'", "bad-assignment"),
        ("types", "def f(a, b):\n    return a", "implicit-any-parameter"),
        ("types", "def f():\n    return 1", "unannotated-return"),
        ("types-3.10", "from enum import StrEnum", "missing-module-attribute"),
    ],
)
def test_a_planted_violation_is_seen(
    plant: Callable[[str, str], Path], name: str, line: str, complaint: str
) -> None:
    copy = plant("rl_actor_envs.planted", line)
    code, output = check(name, copy, "packages/rl-actor-envs/src")
    assert code != 0
    assert any("planted.py" in text and complaint in text for text in joined(output)), output


def test_a_folder_that_import_contracts_would_not_see_is_seen(copied_workspace: Path) -> None:
    hidden = copied_workspace / "packages/rl-actor-envs/src/rl_actor_envs/hidden/module.py"
    hidden.parent.mkdir()
    hidden.write_text('"""Python imports this, import-linter does not see it."""\n')
    code, output = check("lint", copied_workspace)
    assert code != 0
    assert "INP001" in output


def joined(output: str) -> list[str]:
    """Return the lines of `output`, each with its successor: some tools put the file on the next line."""
    lines = output.splitlines()
    return [f"{line} {following}" for line, following in zip(lines, [*lines[1:], ""], strict=True)]
