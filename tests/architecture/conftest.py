"""The workspace under test, and copies of it to plant violations in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.distributions import Distribution, distributions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def members(root: Path) -> dict[str, Distribution]:
    """Import name -> distribution."""
    return {item.import_name: item for item in distributions(root)}


@pytest.fixture
def copied_workspace(root: Path, tmp_path: Path) -> Path:
    """The sources and declarations of the workspace, without tests and generated files."""
    copy = tmp_path / "workspace"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "tests", "dist", ".venv", ".venv-vllm")
    for folder in ("packages", "apps", "tools", "docker"):
        shutil.copytree(root / folder, copy / folder, ignore=ignore)
    for name in ("pyproject.toml", "hatch.toml", "uv.lock", "LICENSE"):
        shutil.copy(root / name, copy / name)
    shutil.copytree(root / "requirements", copy / "requirements")
    return copy


@pytest.fixture
def plant(copied_workspace: Path) -> Callable[[str, str], Path]:
    """Append a line to a module of the copy (creating it and its packages where missing); return the copy."""

    def append(module: str, line: str) -> Path:
        package = module.partition(".")[0]
        folder = next((f for f in copied_workspace.glob(f"*/*/src/{package}")), None)
        if folder is None:
            folder = copied_workspace / "apps" / package / "src" / package
        source, parts = folder.parent, module.split(".")
        for depth in range(1, len(parts)):
            init = source.joinpath(*parts[:depth], "__init__.py")
            init.parent.mkdir(parents=True, exist_ok=True)
            init.touch()
        target = source.joinpath(*parts)
        file = target / "__init__.py" if target.is_dir() else target.with_suffix(".py")
        text = file.read_text() if file.exists() else ""
        file.write_text(f"{text}\n{line}\n")
        return copied_workspace

    return append
