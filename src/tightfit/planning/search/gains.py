"""Gains in speed beside a choice: fields left open, padded dimensions, attention without dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tightfit.errors import ModelError
from tightfit.model_facts import attention_dropout
from tightfit.models import read_config
from tightfit.planning.alignment import Misalignment, dimensions, misaligned
from tightfit.planning.defaults import default_micro_batch, resolve
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration
from tightfit.planning.search.space import sizes_to_try
from tightfit.planning.search.wording import choices_text
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import field_text
from tightfit.tasks import TASKS
from tightfit.techniques import SLOTS
from tightfit.text import percent, size

FEW_OPEN = 2
"""Open fields up to which a recipe counts as pinned: Hugging Face's arguments say nothing of two."""


def gain_of_opening(exploration: Exploration, found: Evaluated) -> str:
    """The gain of leaving fields open for a recipe that pins them all, as a sentence: by a trace or two of what `auto`
    stands for, so at least so much; empty where that is nothing worth saying."""
    recipe, device = exploration.space.recipe, exploration.device
    if recipe.micro_batch_size == "auto" or len(recipe.open_choices()) > FEW_OPEN:
        return ""
    pinned = {slot: getattr(recipe, slot) for slot in SLOTS if Recipe.model_fields[slot].default == "auto"}
    left_open = {slot: value if value == "auto" else value.opened() for slot, value in pinned.items()}
    opened = recipe.model_copy(update={**left_open, "micro_batch_size": "auto"})
    most = max(default_micro_batch(opened, device), recipe.micro_batch_size)
    sizes = [size for size in sizes_to_try(recipe.batch_size) if size <= most]
    best = exploration.largest(resolve(opened, device), sizes, "micro_batch_size")
    if best is None or exploration.speed_of(best) <= (1 + CLOCK_ERROR) * exploration.speed_of(found):
        return ""
    fields = [field for field in ("micro_batch_size", *SLOTS)
              if getattr(best.recipe, field) != getattr(found.recipe, field)]
    time = best.estimate.time
    return (f"Left open, {', '.join(fields)} would give at least {time.throughput:,.0f} {time.unit} instead of "
            f"{found.estimate.time.throughput:,.0f}, with {choices_text(best.recipe, found.recipe)}.")


def misalignments(exploration: Exploration, best: Evaluated) -> tuple[Misalignment, ...]:
    """The chosen recipe's awkward dimensions, with the gain from padding."""

    def gain(padded: Recipe) -> float | None:
        saved = _saved_seconds(exploration, best, "with padded dimensions", {"pad_vocab_to": padded.pad_vocab_to})
        return saved and saved / best.seconds

    try:
        dims = dimensions(best.recipe)
    except ModelError:  # a model of the caller's own
        return ()
    return misaligned(best.recipe, exploration.device, dims, gain)


def without_dropout(exploration: Exploration, best: Evaluated) -> str:
    """The gain from dropping no attention weights, as a sentence: the kernel that keeps packed documents apart without
    a mask has no dropout. Empty where the model drops none, or rows are not packed, or the gain is not worth saying."""
    recipe, precision = best.recipe, best.recipe.precision
    if precision == "auto" or not precision.is_half or not exploration.device.has_flash:
        return ""  # for which there is no such kernel
    if not recipe.data.shares_rows(TASKS[recipe.task]):
        return ""
    with contextlib.suppress(ModelError, TraceBudgetExceeded):  # of a model of the caller's own
        if field := attention_dropout(read_config(recipe)):
            overrides = {**recipe.model_overrides, field: 0.0}
            change = f"model_overrides.{field}=0"
            without = exploration.evaluate_one(recipe.model_copy(update={"model_overrides": overrides}), change)
            if without and without.seconds < (1 - CLOCK_ERROR) * best.seconds:
                return ("Dropout inside attention keeps packed documents apart by a mask; training without it, by "
                        f"{change}, is predicted to make a step {percent(1 - without.seconds / best.seconds)} shorter, "
                        f"with {size(without.estimate.memory.used)} in use.")
    return ""


def _saved_seconds(exploration: Exploration, found: Evaluated, text: str, changes: Mapping[str, Any]) -> float | None:
    """Seconds of a step that changing some fields of a recipe saves, predicted; None where that cannot be.

    text: what progress calls the changed recipe. A compiled recipe is compared uncompiled, which traces sooner: matrix
    products, which the changes are about, are the same kernels there.
    """
    uncompiled = found.recipe.override(compile="off")
    for base in [uncompiled] if uncompiled == found.recipe else [uncompiled, found.recipe]:
        with contextlib.suppress(TraceBudgetExceeded):
            before = exploration.evaluate_one(base, field_text("compile", base.compile))
            after = before and exploration.evaluate_one(base.override(**changes), text)
            if before and after:
                return before.seconds - after.seconds
    return None
