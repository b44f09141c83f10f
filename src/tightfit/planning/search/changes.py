"""Smallest change: the one field whose change makes a recipe fit."""

from __future__ import annotations

from dataclasses import replace

from tightfit.errors import Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.largest import halvings
from tightfit.planning.plan import Change
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import Exploration
from tightfit.planning.search.space import Space, sizes_to_try
from tightfit.planning.search.wording import choices_text
from tightfit.planning.suggestions import Saving, savings
from tightfit.tasks import TASKS
from tightfit.text import size

SHORTEST_LENGTH = 128
"""Tokens of the shortest sequences that are proposed."""


def smallest_change(exploration: Exploration) -> tuple[Change | None, str]:
    """The least change of one field with which something fits, by a trace of the recipe of least memory, and that as a
    sentence.

    None where no single change helps, or where the limit on traces was reached before one did; the sentence then says
    so, and which changes would help together.
    """
    recipe, none = exploration.space.recipe, "No single change would make it fit"
    least = min(exploration.found.values(), key=lambda found: found.estimate.memory.demand)
    allocator = exploration.space.base.expandable_segments
    least = replace(least, recipe=least.recipe.model_copy(update={"expandable_segments": allocator}))
    usable = exploration.usable_bytes(FitRank.SAFE)
    if recipe.mode == "inference":
        return _smaller_batch(exploration, least)
    memory = least.estimate.memory
    if memory.host_missing and not memory.missing:
        none = f"With {size(memory.host_needed)} of host memory it fits; with this one, no single change would help"
    try:
        wait = Saving("offload", "auto", "offload=auto", "what does not fit waits in the host's memory")
        exact_first = sorted((*savings(recipe, exploration.device), wait), key=lambda saving: saving.changes_numerics)
        changes = (_with(exploration, least, saving) for saving in exact_first)
        found = next(filter(None, changes), None)
        together = "" if found else _together(exploration, least)
        if not found and not together:
            found = _shorter(exploration, least, usable)
        if found is not None:
            return found, f"The smallest that makes it fit: {found.text} ({found.why})."
    except TraceBudgetExceeded:
        return None, "No single change was found that would make it fit: the limit on traces was reached."
    if together:
        return None, f"{none}; together these would: {together}."
    if least.held > usable:
        return None, (f"{none}: weights, gradients and optimizer states alone take {size(least.held)}, and "
                      f"{size(max(usable, 0))} are left for them.")
    return None, f"{none}."


def _shorter(exploration: Exploration, least: Evaluated, usable: int) -> Change | None:
    """The longest sequences that fit: a last resort, for they change what is learned."""
    recipe, memory = exploration.space.recipe, least.estimate.memory
    fixed = least.held > usable or memory.host_too_small
    if fixed or TASKS[recipe.task].reads != "tokens":
        return None  # no shorter sequence changes what weights, gradients and states take
    lengths = [length for length in halvings(recipe.seq_len) if length >= SHORTEST_LENGTH]
    found = exploration.largest(least.recipe, lengths, "seq_len")
    return None if found is None else Change(text=f"seq_len={found.recipe.seq_len}", why="shorter sequences",
                                             estimate=found.estimate)


def _with(exploration: Exploration, least: Evaluated, saving: Saving) -> Change | None:
    """The change, if the recipe of least memory fits with it; of the micro-batch the largest that does."""
    space, device, micro = exploration.space, exploration.device, least.recipe.resolved_micro_batch
    text, changes = saving.text, {saving.field: saving.value}
    if saving.field == "micro_batch_size":
        sizes = [size for size in sizes_to_try(space.recipe.batch_size) if size < micro]
        found = exploration.largest(least.recipe, sizes, "micro_batch_size")
        text = "" if found is None else f"micro_batch_size={found.recipe.micro_batch_size}"
    else:
        changed = least.recipe.override(**changes)
        if changed == least.recipe:
            return None
        if changed.refusals(device) or saving.value == "auto":  # what a change needs of open fields, the search finds
            try:
                opened = Space(space.recipe.override(**changes), device)
                changed = opened.recipe_for(opened.least_memory(opened.combinations), micro)
            except Refused:
                return None
        found = exploration.evaluate_one(changed, f"whether {text} would do")
    also = ""
    if found is not None and device.host_assumed and found.estimate.memory.host_missing:
        device = device.in_machine_with(found.estimate.memory.host_needed)
        found = exploration.in_machine_of(device, found)
    if found is None or not found.fit_rank.is_safe:
        return None
    if found.estimate.memory.host_by_category:
        also = f", {size(found.estimate.memory.host)} of {size(device.host_bytes)}" + " assumed" * device.host_assumed
    numerics = [change for change in space.numerics(found.recipe) if change.partition("=")[0] != saving.field]
    also += f"; with {' and '.join(numerics)}, which changes numerics" if numerics else ""
    return Change(text=text, why=saving.why + also, estimate=found.estimate)


def _together(exploration: Exploration, least: Evaluated) -> str:
    """Changes with which it fits: every pin that can save memory without changing numerics does; empty where that is
    not enough."""
    recipe, device = exploration.space.recipe, exploration.device
    thrifty = {saving.field: saving.value for saving in savings(recipe, device) if not saving.changes_numerics}
    if len(thrifty) < 2:
        return ""
    thrifty.pop("micro_batch_size", None)
    whole = least.recipe.override(**thrifty)
    if whole.refusals(device):
        return ""
    sizes = [size for size in sizes_to_try(recipe.batch_size) if size <= least.recipe.resolved_micro_batch]
    found = exploration.largest(whole, sizes, "micro_batch_size")
    return "" if found is None else choices_text(found.recipe, least.recipe)


def _smaller_batch(exploration: Exploration, nearest: Evaluated) -> tuple[Change | None, str]:
    """The largest batch of inference, halving, with which the nearest combination fits, and that as a sentence."""
    found = exploration.largest(nearest.recipe, halvings(nearest.recipe.batch_size), "batch_size", "micro_batch_size")
    if found is None:
        return None, "No smaller batch would make it fit, not even batch_size=1."
    change = Change(text=f"batch_size={found.recipe.batch_size}", why="fewer at once", estimate=found.estimate)
    return change, f"The smallest that makes it fit: {change.text} ({change.why})."
