"""Checks of a recipe's fields that compare evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.errors import RecipeError
from tightfit.metrics import METRICS
from tightfit.tasks import get_task

if TYPE_CHECKING:
    from tightfit.recipe.schema import Recipe

FIELDS = ("metric_for_best_model", "load_best_model_at_end", "early_stopping_patience")
"""The fields that compare evaluations."""


def reasons_against(metric: str, greater_is_better: bool) -> list[str]:
    """Reasons why a metric of TrainingArguments cannot be a recipe's, as sentences."""
    if metric not in METRICS:
        *others, last = METRICS
        return [f"metric_for_best_model: {metric!r} is of a compute_metrics, which a recipe does not have; write "
                f"{', '.join(others)} or {last}"]
    if greater_is_better is not METRICS[metric].larger_is_better:
        return [f"greater_is_better: {greater_is_better} is not so of {metric}; write {not greater_is_better}"]
    return []


def comparing_field(recipe: Recipe) -> str:
    """The field by which a recipe compares evaluations, as it does."""
    return next(name for name in FIELDS if getattr(recipe, name))


def check_best(recipe: Recipe) -> None:
    """Raises RecipeError where a recipe compares evaluations that it does not make, or by what they do not measure."""
    if recipe.eval_steps is None:
        raise RecipeError(f"{comparing_field(recipe)}: the recipe evaluates at its end alone, and there is no best of "
                          "one; write eval_steps=epoch, or a number of steps")
    metric = recipe.metric_for_best_model or "loss"
    kind = "classes" if get_task(recipe.task).predicts == "class" else "tokens"
    if METRICS[metric].only_of not in (None, kind):
        raise RecipeError(f"metric_for_best_model: {metric!r} is not measured where {kind} are predicted, as by "
                          f"{recipe.task}; write accuracy or loss")
