"""The recipes that come with the application."""

from __future__ import annotations

from rl_app_core.recipes import Recipes

RECIPES = Recipes.of_package(__file__)
