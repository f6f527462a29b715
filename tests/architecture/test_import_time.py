"""What importing a package loads and changes, observed in fresh interpreters."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.checks.importing import changed_by, loaded_by
from tools.distributions import Distribution

ENGINES = {"vllm", "megatron", "tensorrt_llm"}

#: What stays unloaded when every module of a package is imported …
UNLOADED_BY_MODULES = {
    "rl_gym_bridge": {"torch", "ray", "transformers", "nemo_gym", "numpy", *ENGINES},
    "rl_algorithms": {"ray", *ENGINES},
}
#: … and when only the package is.
UNLOADED_BY_PACKAGE = {
    "rl_generation": {"ray", "transformers", *ENGINES},
    "rl_policy_megatron": {"ray", "transformers", *ENGINES},
}


def missing_engines(distribution: Distribution, module: str) -> set[str]:
    """Engines that are not installed here and that importing `module` itself, or one it imports, asks for."""
    if not module.startswith(("rl_generation.vllm.", "rl_generation.trtllm.")):
        return set()
    absent = {engine for engine in ENGINES if find_spec(engine) is None}
    file = distribution.folder / "src" / Path(*module.split(".")).with_suffix(".py")
    named = {
        name.split(".")[0]
        for statement in ast.parse(file.read_text()).body
        for name in imported_names(statement)
    }
    return named & absent


def imported_names(statement: ast.stmt) -> list[str]:
    """The absolute modules that one statement at the top of a file imports."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module]
    return []


@pytest.mark.parametrize("package", UNLOADED_BY_MODULES)
def test_no_module_loads_what_is_forbidden(members: dict[str, Distribution], package: str) -> None:
    assert UNLOADED_BY_MODULES[package] & loaded_by(members[package].modules()) == set()


@pytest.mark.parametrize("package", UNLOADED_BY_PACKAGE)
def test_the_package_alone_loads_nothing_heavy(package: str) -> None:
    assert UNLOADED_BY_PACKAGE[package] & loaded_by([package]) == set()


@pytest.mark.parametrize("package", [*UNLOADED_BY_MODULES, *UNLOADED_BY_PACKAGE])
def test_a_planted_heavy_import_is_seen(
    plant: Callable[[str, str], Path], tmp_path: Path, package: str
) -> None:
    heavy = sorted((UNLOADED_BY_MODULES | UNLOADED_BY_PACKAGE)[package])[0]
    (tmp_path / "stand_ins").mkdir()
    (tmp_path / "stand_ins" / f"{heavy}.py").touch()
    copy = plant(package, f"import {heavy}")
    assert heavy in loaded_by([package], search=[tmp_path / "stand_ins", *copy.glob("*/*/src")])


def test_the_leaf_loads_the_standard_library_only(members: dict[str, Distribution]) -> None:
    loaded = loaded_by(members["rl_actor_envs"].modules())
    assert loaded - sys.stdlib_module_names == {"rl_actor_envs"}


def test_importing_any_module_changes_nothing_else(members: dict[str, Distribution]) -> None:
    modules = [
        module
        for distribution in members.values()
        for module in distribution.modules()
        if not missing_engines(distribution, module)
    ]
    # What derives from an engine's classes can be imported only beside it; the engine's own tests do.
    assert len(modules) > 200
    assert changed_by(modules, own=sorted(members)) == []


@pytest.mark.parametrize(
    ("statement", "change"),
    [
        ("import os; os.environ['PLANTED'] = '1'", "environment variable PLANTED"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "thread",
        ),
        ("import pathlib; pathlib.Path('planted').touch()", "file"),
        ("import sys; sys.path.append('planted')", "sys.path"),
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "handler of SIGTERM"),
        ("import logging; logging.basicConfig()", "root logger"),
        ("import warnings; warnings.simplefilter('ignore')", "warning filters"),
        ("import random; random.seed(0)", "random state"),
        (
            "import subprocess as s; child = s.Popen(['sleep', '5'], stdout=s.DEVNULL, stderr=s.DEVNULL)",
            "child",
        ),
        ("print('planted')", "wrote output"),
    ],
)
def test_a_planted_side_effect_is_seen(tmp_path: Path, statement: str, change: str) -> None:
    (tmp_path / "planted.py").write_text(statement + "\n")
    changes = changed_by(["planted"], search=[tmp_path], own=["planted"])
    assert any(line.startswith((f"planted: {change}", change)) for line in changes), changes


def test_planted_changes_to_torch_are_seen(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(
        "import torch\ntorch.manual_seed(3)\ntorch.cuda.current_device = lambda: 0\n"
    )
    changes = changed_by(["planted"], search=[tmp_path], own=["planted"])
    assert {line.split(": ")[1] for line in changes} >= {"torch seed", "torch.cuda.current_device"}


def test_what_third_parties_do_is_not_held_against_the_importer(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text("import os; os.environ['NOISY'] = '1'; print('noisy')\n")
    (tmp_path / "ours.py").write_text("import noisy\n")
    assert "noisy" in loaded_by(["ours"], search=[tmp_path])
    assert changed_by(["ours"], search=[tmp_path], own=["ours"]) == []
