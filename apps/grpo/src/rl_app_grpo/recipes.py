"""The recipes that come with the application, by name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from rl_app_core.config import ConfigError

DEFAULT_RECIPE = "cpu"


def recipe_names() -> tuple[str, ...]:
    """Names of the shipped recipes, sorted."""
    return tuple(sorted(file.stem for file in _folder().glob("*.yaml")))


def find_recipe(name: str) -> Path:
    """A shipped recipe by its name, or any YAML file by its path.

    Raises:
        ConfigError: it is neither; suggests the closest name.
    """
    if (path := Path(name)).is_file():
        return path
    shipped = _folder() / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    names = recipe_names()
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"shipped recipes: {', '.join(names)}"
    raise ConfigError(f"recipe {name!r} is neither a file nor a shipped recipe; {hint}")


def _folder() -> Path:
    """Inside the package in a wheel, beside ``src`` in a checkout."""
    here = Path(__file__).resolve().parent
    inside = here / "recipes"
    return inside if inside.is_dir() else here.parents[1] / "recipes"
