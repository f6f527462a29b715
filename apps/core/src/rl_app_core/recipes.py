"""The recipes that come with an application, by name."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from .config import ConfigError

DEFAULT_RECIPE = "cpu"


@dataclass(frozen=True, slots=True)
class Recipes:
    """YAML files in one folder."""

    folder: Path

    @classmethod
    def of_package(cls, module_file: str) -> Recipes:
        """Of the package that ``module_file`` lies in: inside it in a wheel, beside ``src`` in a checkout."""
        here = Path(module_file).resolve().parent
        inside = here / "recipes"
        return cls(inside if inside.is_dir() else here.parents[1] / "recipes")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the shipped recipes, sorted."""
        return tuple(sorted(file.stem for file in self.folder.glob("*.yaml")))

    def find(self, name: str) -> Path:
        """A shipped recipe by its name, or any YAML file by its path.

        Raises:
            ConfigError: it is neither; suggests the closest name.
        """
        if (path := Path(name)).is_file():
            return path
        shipped = self.folder / f"{name}.yaml"
        if shipped.is_file():
            return shipped
        close = get_close_matches(name, self.names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"shipped recipes: {', '.join(self.names)}"
        raise ConfigError(f"recipe {name!r} is neither a file nor a shipped recipe; {hint}")
