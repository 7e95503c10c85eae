"""Recipes: one function per published run of the paper, with its hyper-parameters; all can be shrunk with ``scale``.

recipe = get_recipe("llama-130m", scale=0.1)
for run in recipe.runs(optimizers=["adam", "cosmos"]): train(run)
"""

from cosmos_lab.recipes import gpt, llama, project  # noqa: F401  (importing registers)
from cosmos_lab.recipes.recipe import RECIPES, Recipe, get_recipe, shrink
from cosmos_lab.recipes.variants import label

__all__ = ["RECIPES", "Recipe", "get_recipe", "label", "shrink"]
