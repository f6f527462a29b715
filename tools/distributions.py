"""Finds the distributions of a workspace."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Distribution:
    """One folder with a pyproject.toml and `src/<import_name>/`."""

    folder: Path
    declaration: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.declaration["project"]["name"]

    @property
    def import_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        return self.folder / "src" / self.import_name

    @property
    def minimum_python(self) -> tuple[int, ...]:
        """The lower bound of `requires-python`, e.g. (3, 10)."""
        bound = self.declaration["project"]["requires-python"].removeprefix(">=")
        return tuple(int(part) for part in bound.split("."))

    @property
    def console_scripts(self) -> list[str]:
        """Names of the commands that installing it brings."""
        return sorted(self.declaration["project"].get("scripts", {}))

    def modules(self) -> list[str]:
        """Return the dotted names of all modules but `__main__`, packages before what is in them."""
        files = sorted(self.package.rglob("*.py"), key=lambda file: (len(file.parts), file))
        return [
            ".".join(file.relative_to(self.folder / "src").with_suffix("").parts).removesuffix(".__init__")
            for file in files
            if file.name != "__main__.py"
        ]


def distributions(root: Path) -> list[Distribution]:
    """Return the distributions under `packages/` and `apps/` of `root`, sorted by name."""
    found = [
        Distribution(file.parent, tomllib.loads(file.read_text()))
        for pattern in ("packages/*/pyproject.toml", "apps/*/pyproject.toml")
        for file in root.glob(pattern)
    ]
    return sorted((item for item in found if "build-system" in item.declaration), key=lambda item: item.name)
