"""Learning-rate schedules as pure functions of the step, with the names and the values of transformers' schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

from tightfit.recipe import Recipe

Shape = Callable[[int, int, int], float]
"""(steps since warm-up began, warm-up steps, all steps) -> factor on the peak, after warm-up."""


def _linear(step: int, warmup: int, total: int) -> float:
    return max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, warmup: int, total: int) -> float:
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _inverse_sqrt(step: int, warmup: int, total: int) -> float:
    timescale = warmup or 10_000
    return 1.0 / math.sqrt((step + timescale - warmup) / timescale)


POLYNOMIAL_END = 1e-7
"""The learning rate that the polynomial schedule ends at, as in transformers."""

SHAPES: dict[str, Shape] = {
    "linear": _linear,
    "cosine": _cosine,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "inverse_sqrt": _inverse_sqrt,
}


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of the update numbered `step`, from 0."""
    peak, warmup, total, kind = recipe.learning_rate, recipe.warmup_steps, recipe.max_steps, recipe.lr_scheduler_type
    if kind == "constant":
        return peak
    if step < warmup:
        return peak * step / warmup
    if kind == "polynomial":
        if step > total:
            return POLYNOMIAL_END
        return (peak - POLYNOMIAL_END) * (1 - (step - warmup) / max(1, total - warmup)) + POLYNOMIAL_END
    return peak * SHAPES[kind](step, warmup, total)
