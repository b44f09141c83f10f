"""A recipe's build on the device that it runs on, and the data that it trains on."""

from __future__ import annotations

from typing import Any

from tightfit.backends import load_backend
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe


def built(recipe: Recipe | dict[str, Any], model: Any = None) -> Any:
    """The build of a recipe, with what it leaves open resolved. model: a module in place of the recipe's."""
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_dict(recipe)
    backend = load_backend(recipe.backend.name)
    device = backend.device(recipe)
    return backend.build(resolve(recipe, device), device, model)


def global_batches_of(build: Any) -> GlobalBatchLoader:
    """The global batches that a build is trained on."""
    return GlobalBatchLoader(prepare(build.recipe, build.facts).train, build.recipe)
