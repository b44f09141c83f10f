"""Gains in speed beside a choice: fields left open, attention without dropout, padded dimensions."""

from __future__ import annotations

import contextlib

from tightfit.errors import ModelError
from tightfit.planning.alignment import Misalignment, dimensions, misaligned
from tightfit.planning.defaults import default_micro_batch, resolve
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, MICRO, Exploration
from tightfit.planning.search.space import micro_batch_sizes
from tightfit.planning.search.wording import choices_text
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS
from tightfit.techniques.attention import NO_DROPOUT
from tightfit.text import size

FEW_OPEN = 2
"""Open fields up to which a recipe counts as pinned: Hugging Face's arguments say nothing of two."""


def gain_of_opening(exploration: Exploration, found: Evaluated) -> str:
    """The gain of leaving fields open for a recipe that pins them all, as a sentence: by a trace or two of what `auto`
    stands for, so at least so much; empty where that is nothing worth saying."""
    recipe, device = exploration.space.recipe, exploration.device
    if recipe.micro_batch_size == "auto" or len(recipe.open_choices()) > FEW_OPEN:
        return ""
    left_open = [slot for slot in SLOTS if Recipe.model_fields[slot].default == "auto"]
    opened = recipe.model_copy(update={**dict.fromkeys(left_open, "auto"), MICRO: "auto"})
    kept = {slot: pinned for slot in SLOTS if (pinned := getattr(recipe, slot)) != "auto" and pinned.numerics_change}
    most = max(default_micro_batch(opened, device), recipe.micro_batch_size)
    sizes = [size for size in micro_batch_sizes(recipe.batch_size) if size <= most]
    best = exploration.largest(resolve(opened, device).model_copy(update=kept), sizes)
    if best is None or best.speed <= (1 + CLOCK_ERROR) * found.speed:
        return ""
    fields = [field for field in (MICRO, *SLOTS) if getattr(best.recipe, field) != getattr(found.recipe, field)]
    time = best.estimate.time
    return (f"Left open, {', '.join(fields)} would give at least {time.throughput:,.0f} {time.unit} instead of "
            f"{found.estimate.time.throughput:,.0f}, with {choices_text(best.recipe, found.recipe)}.")


def gain_without_dropout(exploration: Exploration, found: Evaluated) -> str:
    """The cost of the mask by which documents of a row are kept apart where attention has dropout, as a sentence, by
    one trace; empty where there is none."""
    said = next((note for note in found.estimate.notes if NO_DROPOUT in note), "")
    field = said.partition(NO_DROPOUT)[2].partition("=")[0]
    if not field:
        return ""
    changed = found.recipe.override(model_overrides={**found.recipe.model_overrides, field: 0.0})
    with contextlib.suppress(TraceBudgetExceeded):
        without = exploration.evaluate_one(changed, f"model_overrides.{field}=0")
        if without is not None and without.speed > found.speed:
            time, saved = without.estimate.time, found.estimate.memory.used - without.estimate.memory.used
            return (f"attention: model_overrides.{field}=0 trains without dropout in attention, at "
                    f"{time.throughput:,.0f} {time.unit} in place of {found.estimate.time.throughput:,.0f} and with "
                    f"{size(max(saved, 0))} less at the peak: packed documents then need no mask")
    return ""


def misalignments(exploration: Exploration, best: Evaluated) -> tuple[Misalignment, ...]:
    """The chosen recipe's awkward dimensions, with the gain from padding by a trace of the padded recipe."""

    def gain(padded: Recipe) -> float | None:
        try:
            cost = exploration.evaluate_one(padded, "with padded dimensions")
        except TraceBudgetExceeded:
            return None
        return None if cost is None else 1 - cost.seconds / best.seconds

    try:
        dims = dimensions(best.recipe)
    except ModelError:  # a model of the caller's own
        return ()
    return misaligned(best.recipe, exploration.device, dims, gain)
