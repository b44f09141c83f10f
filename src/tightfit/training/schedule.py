"""Learning-rate schedules as pure functions of the step, with the names and the values of transformers' schedules."""

from __future__ import annotations

import math
from typing import Any

from tightfit.recipe import Recipe


def length_field(recipe: Recipe) -> str:
    """The field that says how long the run is."""
    return "max_steps" if recipe.num_train_epochs is None else "num_train_epochs"


def respaced(recipe: Recipe, step: int) -> str:
    """The end of a sentence on a run that goes on at `step` to another number of steps than it was begun with; empty
    where its learning rates do not depend on that."""
    endless = recipe.lr_scheduler_type in ("constant", "constant_with_warmup", "inverse_sqrt")
    if endless or "num_stable_steps" in recipe.lr_scheduler_kwargs:
        return ""
    return (f"; its {recipe.lr_scheduler_type} schedule now spans all of these, and goes on at a learning rate of "
            f"{learning_rate(recipe, step):.2g}")


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of the update numbered `step`, from 0."""
    peak, warmup, total, kind = recipe.learning_rate, recipe.warmup, recipe.max_steps, recipe.lr_scheduler_type
    given: dict[str, Any] = recipe.lr_scheduler_kwargs
    if kind == "constant":
        return peak
    least: float = given.get("min_lr_ratio", 0.0)
    if step < warmup:
        curve, done = given.get("warmup_type", "linear"), step / warmup
        return peak * _between(least, done if curve == "linear" else _fallen(curve, 1.0 - done))
    decay, cycles = max(1, total - warmup), given.get("num_cycles", 0.5)
    progress = (step - warmup) / decay
    if kind == "linear":
        return peak * max(0.0, (total - step) / decay)
    if kind in ("cosine", "cosine_with_min_lr"):
        least = given.get("min_lr_rate", given.get("min_lr", 0.0) / peak)
        return peak * max(0.0, _between(least, _fallen("cosine", progress, cycles)))
    if kind == "cosine_with_restarts":
        return peak * _fallen("cosine", given.get("num_cycles", 1) * progress % 1.0) if progress < 1 else 0.0
    if kind == "inverse_sqrt":
        timescale = warmup or 10_000
        return peak * (1.0 / math.sqrt((step + timescale - warmup) / timescale))
    if kind == "polynomial":
        end: float = given.get("lr_end", 1e-7)
        left: float = (0.0 if step > total else 1 - progress) ** given.get("power", 1.0)
        return (peak - end) * left + end
    if kind == "warmup_stable_decay":
        fall: float = given["num_decay_steps"]
        stable_until: float = warmup + given.get("num_stable_steps", total - warmup - fall)
        if step >= stable_until + fall:
            return peak * least
        if step >= stable_until:
            curve = given.get("decay_type", "cosine")
            return peak * max(0.0, _between(least, _fallen(curve, (step - stable_until) / max(1, fall), cycles)))
    return peak  # constant_with_warmup, and before a fall


def _between(least: float, share: float) -> float:
    return share * (1.0 - least) + least


def _fallen(curve: str, progress: float, cycles: float = 0.5) -> float:
    """Decay factor, from 1 down to 0, at a progress from 0 to 1, by a curve of `CURVES`; warm-up is its reverse."""
    if curve == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
    return 1.0 - (math.sqrt(progress) if curve == "1-sqrt" else progress)
