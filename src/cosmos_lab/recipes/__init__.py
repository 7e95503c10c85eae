"""Recipes: one function per published run of the paper, with its hyper-parameters; all shrink with ``scale``."""

from cosmos_lab.recipes import gpt, llama, project  # noqa: F401  (importing registers)
from cosmos_lab.recipes.recipe import RECIPES, Recipe, get_recipe, shrink
from cosmos_lab.recipes.variants import label

__all__ = ["RECIPES", "Recipe", "get_recipe", "label", "shrink"]
