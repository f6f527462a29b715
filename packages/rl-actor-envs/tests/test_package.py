"""What importing the package loads, and whether its README tells the truth."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent
SOURCE = PACKAGE / "src"
HEAVY = ("asyncio", "subprocess", "multiprocessing", "threading", "concurrent", "socket", "ssl", "logging",
         "inspect", "importlib.metadata", "argparse", "ctypes", "http", "email", "unittest")  # fmt: skip


def python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    files = sorted(SOURCE.rglob("*.py"))
    return [
        ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for file in files
    ]


def loaded_by(module: str) -> set[str]:
    """What importing ``module`` adds to an interpreter without site packages."""
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); before = set(sys.modules); import {module}; "
        f"print(*sorted(set(sys.modules) - before))"
    )
    return set(python("-S", "-I", "-c", code).split())


@pytest.mark.parametrize("module", modules())
def test_only_light_modules_of_the_standard_library_are_imported(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"rl_actor_envs"}
    assert foreign == set()
    assert loaded & set(HEAVY) == set()


def test_no_file_names_a_module_from_elsewhere_not_even_inside_a_function() -> None:
    named = {
        name
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    assert named
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names == set()


def test_importing_the_package_loads_nothing_of_it_but_its_version() -> None:
    assert {name for name in loaded_by("rl_actor_envs") if name.startswith("rl_")} == {
        "rl_actor_envs",
        "rl_actor_envs._version",
    }


def test_the_readmes_example_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(examples) == text.count("```python") == 1
    for code, output in examples:
        script = tmp_path / "example.py"
        script.write_text(code, encoding="utf-8")
        assert python(str(script)) == output


def test_the_readmes_listing_is_what_the_table_prints() -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"```console\n\$ python table.py all\n(.*?)```", text, re.DOTALL)
    assert python("-S", "-I", str(SOURCE / "rl_actor_envs" / "table.py"), "all") == listing
