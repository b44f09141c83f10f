"""Learning-rate schedules as pure functions of the step, with the names and the values of transformers' schedules."""

from __future__ import annotations

import math

from tightfit.recipe import Recipe

POLYNOMIAL_END = 1e-7
"""The learning rate that the polynomial schedule ends at, as in transformers."""


def length_field(recipe: Recipe) -> str:
    """The field that says how long the run is."""
    return "max_steps" if recipe.num_train_epochs is None else "num_train_epochs"


def respaced(recipe: Recipe, step: int) -> str:
    """The end of a sentence on a run that goes on at `step` to another number of steps than it was begun with; empty
    where its learning rates do not depend on that."""
    if recipe.lr_scheduler_type in ("constant", "constant_with_warmup", "inverse_sqrt"):
        return ""
    return (f"; its {recipe.lr_scheduler_type} schedule now spans all of these, and goes on at a learning rate of "
            f"{learning_rate(recipe, step):.2g}")


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of the update numbered `step`, from 0."""
    peak, warmup, total, kind = recipe.learning_rate, recipe.warmup, recipe.max_steps, recipe.lr_scheduler_type
    if kind == "constant":
        return peak
    if step < warmup:
        return peak * step / warmup
    decay = max(1, total - warmup)
    if kind == "linear":
        return peak * max(0.0, (total - step) / decay)
    if kind == "cosine":
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / decay))))
    if kind == "inverse_sqrt":
        timescale = warmup or 10_000
        return peak * (1.0 / math.sqrt((step + timescale - warmup) / timescale))
    if kind == "polynomial":
        left = 0.0 if step > total else 1 - (step - warmup) / decay
        return (peak - POLYNOMIAL_END) * left + POLYNOMIAL_END
    return peak  # constant_with_warmup
