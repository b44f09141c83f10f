"""What a recipe needs to tell its best evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.errors import RecipeError
from tightfit.tasks import get_task

if TYPE_CHECKING:
    from tightfit.recipe.schema import Recipe

METRICS = ("loss", "perplexity", "accuracy", "f1")
LARGER_IS_BETTER = frozenset({"eval_accuracy", "eval_f1"})
"""What can be compared, and of these, as they are written down, those of which more is better."""
FIELDS = ("metric_for_best_model", "load_best_model_at_end", "early_stopping_patience")
"""The fields that compare evaluations."""


def reasons_against(metric: str, greater_is_better: bool) -> list[str]:
    """Why a metric of TrainingArguments cannot be a recipe's, as sentences."""
    if metric not in METRICS:
        return [f"metric_for_best_model: {metric!r} is of a compute_metrics, which a recipe does not have; write "
                f"{', '.join(METRICS[:-1])} or {METRICS[-1]}"]
    if greater_is_better is not (f"eval_{metric}" in LARGER_IS_BETTER):
        return [f"greater_is_better: {greater_is_better} is not so of {metric}; write {not greater_is_better}"]
    return []


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
