"""The recipes that come with the application, and those of the jobs that train teachers."""

from __future__ import annotations

from rl_app_core.recipes import Recipes

RECIPES = Recipes.of_package(__file__)
TEACHERS = Recipes(RECIPES.folder / "teachers")
