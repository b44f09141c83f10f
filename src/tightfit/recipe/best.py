"""What a recipe needs to tell its best evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.errors import RecipeError
from tightfit.tasks import get_task

if TYPE_CHECKING:
    from tightfit.recipe.schema import Recipe

FIELDS = ("metric_for_best_model", "load_best_model_at_end", "early_stopping_patience")
"""The fields that compare evaluations."""


def check_best(recipe: Recipe) -> None:
    """Raises RecipeError where a recipe compares evaluations that it does not make, or by what they do not measure."""
    field = next(name for name in FIELDS if getattr(recipe, name))
    if recipe.eval_steps is None:
        raise RecipeError(f"{field}: the recipe evaluates at its end alone, and there is no best of one; write "
                          "eval_steps=<a number of steps>")
    metric, of_classes = recipe.metric_for_best_model, get_task(recipe.task).predicts == "class"
    if metric == ("perplexity" if of_classes else "f1"):
        kind = "classes" if of_classes else "tokens"
        raise RecipeError(f"metric_for_best_model: {metric!r} is not measured where {kind} are predicted, as by "
                          f"{recipe.task}; write accuracy or loss")
