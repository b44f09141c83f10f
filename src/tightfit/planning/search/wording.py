"""Fields and changes of a recipe in the words of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightfit.recipe import Recipe
from tightfit.recipe.yaml import field_text
from tightfit.techniques import VARIANTS, Technique, is_searched


def size_field(recipe: Recipe) -> str:
    """The field that says how many samples go through the model at once."""
    return "micro_batch_size" if recipe.mode == "train" else "batch_size"


def choices_text(recipe: Recipe, other: Recipe | None = None, fields: Sequence[str] = ()) -> str:
    """A resolved recipe's choices as a person writes them, the micro-batch first; with `other`, only those that differ
    from it, else `fields` of them."""
    recipe = without_open_allocator(recipe)
    other = None if other is None else without_open_allocator(other)
    slots = VARIANTS if other is None else filter(is_searched, VARIANTS)
    every = (size_field(recipe), *slots, "expandable_segments")
    shown = [field for field in every if (field in fields if other is None else
                                          getattr(recipe, field) != getattr(other, field))]
    changes = (_difference(field, getattr(recipe, field), getattr(other, field, None)) for field in shown)
    return " ".join(changes) or "the same"


def _difference(field: str, value: Any, other: Any) -> str:
    """A field, or only those of its knobs that differ from another value of the same technique."""
    if not isinstance(value, Technique) or type(value) is not type(other):
        return field_text(field, value)
    knobs = {knob: setting for knob, setting in vars(value).items() if setting != getattr(other, knob)}
    return " ".join(field_text(f"{field}.{knob}", setting) for knob, setting in knobs.items())


def without_open_allocator(recipe: Recipe) -> Recipe:
    """The recipe with the allocator's usual setting where none was decided."""
    return recipe.model_copy(update={"expandable_segments": recipe.expandable_segments is True})


def changing(changed: Sequence[str]) -> str:
    """Subjects of a change, and the verb."""
    return f"{' and '.join(changed)} change{'s' * (len(changed) == 1)}"
