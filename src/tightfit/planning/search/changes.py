"""Changes that would make a recipe fit, or go faster: one field, another GPU, fields left open, padding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.alignment import Misalignment, dimensions, misaligned
from tightfit.planning.defaults import default_micro_batch, resolve
from tightfit.planning.estimate import Margin
from tightfit.planning.plan import Change
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, MICRO, Exploration
from tightfit.planning.search.space import ALLOCATOR, Choice, Space, micro_batch_sizes, trace_cost
from tightfit.planning.search.wording import changing, choices_text
from tightfit.planning.suggestions import Saving, savings
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.techniques import SLOTS
from tightfit.techniques.attention import NO_DROPOUT
from tightfit.text import size

SHORTEST = 128
"""Tokens of the shortest sequences that are proposed."""
FEW_OPEN = 2
"""Open fields up to which a recipe counts as pinned: Hugging Face's arguments say nothing of two."""


def smallest_change(exploration: Exploration) -> tuple[Change | None, str]:
    """The least change of one field with which something fits, by a trace of the thriftiest recipe of the rest, and
    that as a sentence.

    None where no single change helps, or where the limit on traces was reached before one did; the sentence then says
    so, and which changes would help together.
    """
    recipe, none = exploration.space.recipe, "No single change would make it fit"
    least = min(exploration.found.values(), key=lambda found: found.estimate.memory.demand)
    allocator = exploration.space.base.expandable_segments
    least = replace(least, recipe=least.recipe.model_copy(update={ALLOCATOR: allocator}))
    usable = exploration.usable_bytes(with_margin=True)
    if recipe.mode == "inference":
        return _smaller_batch(exploration, least)
    memory = least.estimate.memory
    if memory.host_missing and not memory.missing:
        none = f"With {size(memory.host_needed)} of host memory it fits; with this one, no single change would help"
    try:
        for found in _changes(exploration, least, usable):
            if found is not None:
                return found, f"The smallest that makes it fit: {found.text} ({found.why})."
        together = _together(exploration, least)
    except TraceBudgetExceeded:
        return None, "No single change was found that would make it fit: the limit on traces was reached."
    if together:
        return None, f"{none}; together these would: {together}."
    if least.held > usable:
        return None, (f"{none}: weights, gradients and optimizer states alone take {size(least.held)}, and "
                      f"{size(max(usable, 0))} are left for them.")
    return None, f"{none}."


def _changes(exploration: Exploration, least: Evaluated, usable: int) -> Iterator[Change | None]:
    """Changes of what is pinned, the smallest first, then a shorter sequence; None for what does not help."""
    recipe, memory = exploration.space.recipe, least.estimate.memory
    for saving in savings(recipe, exploration.device):
        yield _with(exploration, least, saving)
    fixed = least.held > usable or memory.host_missing > memory.host_by_category.get("activations", 0)
    if fixed or TASKS[recipe.task].reads != "tokens":
        return  # no shorter sequence changes what weights, gradients and states take
    halves = [recipe.seq_len >> times for times in range(recipe.seq_len.bit_length(), 0, -1)]
    found = exploration.largest(least.recipe, [length for length in halves if length >= SHORTEST], ("seq_len",))
    if found is not None:
        yield Change(text=f"seq_len={found.recipe.seq_len}", why="shorter sequences", estimate=found.estimate)


def _with(exploration: Exploration, least: Evaluated, saving: Saving) -> Change | None:
    """The change, if the thriftiest recipe fits with it; of the micro-batch the largest that does."""
    space, device, micro = exploration.space, exploration.device, _micro(least)
    text, changes = saving.text, {saving.field: saving.value}
    if saving.field == MICRO:
        sizes = [size for size in micro_batch_sizes(space.recipe.batch_size) if size < micro]
        found = exploration.largest(least.recipe, sizes)
        text = "" if found is None else f"{MICRO}={found.recipe.micro_batch_size}"
    else:
        changed = least.recipe.override(**changes)
        if changed == least.recipe:
            return None
        if changed.refusals(device):  # what a change needs of an open field, the search finds
            try:
                opened = Space(space.recipe.override(**changes), device)
                changed = opened.recipe_for(opened.least_memory(opened.choices), micro)
            except Refused:
                return None
        found = exploration.evaluate_one(changed, f"whether {text} would do")
    if found is None or not found.estimate.safe:
        return None
    numerics = [change for change in space.numerics(found.recipe) if change.partition("=")[0] != saving.field]
    also = f"; with {' and '.join(numerics)}, which changes numerics" if numerics else ""
    return Change(text=text, why=saving.why + also, estimate=found.estimate)


def _together(exploration: Exploration, least: Evaluated) -> str:
    """Changes with which it fits: every pin that can save memory without changing numerics does; empty where that is
    not enough."""
    recipe, device = exploration.space.recipe, exploration.device
    thrifty = {saving.field: saving.value for saving in savings(recipe, device) if not saving.changes_numerics}
    if len(thrifty) < 2:
        return ""
    thrifty.pop(MICRO, None)
    whole = least.recipe.override(**thrifty)
    if whole.refusals(device):
        return ""
    sizes = [size for size in micro_batch_sizes(recipe.batch_size) if size <= _micro(least)]
    found = exploration.largest(whole, sizes)
    return "" if found is None else choices_text(found.recipe, least.recipe)


def _micro(found: Evaluated) -> int:
    micro = found.recipe.micro_batch_size
    assert micro != "auto"
    return micro


def _smaller_batch(exploration: Exploration, nearest: Evaluated) -> tuple[Change | None, str]:
    """The largest batch of inference, halving, with which the nearest combination fits, and that as a sentence."""
    batches = [nearest.recipe.batch_size >> shift for shift in range(nearest.recipe.batch_size.bit_length())][:0:-1]
    found = exploration.largest(nearest.recipe, batches, ("batch_size", MICRO))
    if found is None:
        return None, "No smaller batch would make it fit, not even batch_size=1."
    change = Change(text=f"batch_size={found.recipe.batch_size}", why="fewer at once", estimate=found.estimate)
    return change, f"The smallest that makes it fit: {change.text} ({change.why})."


def smallest_gpu(
    exploration: Exploration, catalogue: Sequence[Device], margin: Margin
) -> tuple[Device | None, str, str]:
    """The smallest GPU of the catalogue on which the recipe as written fits; that as a sentence, and the same of the
    choice where it changes numerics."""
    space, found = exploration.space, exploration.found
    if exploration.device.kind != "cuda" or not catalogue or space.recipe.backend.compiles_whole_steps:
        return None, "", ""
    mildest = exploration.levels[0]
    gpu, text = _smallest(exploration, catalogue, margin, [c for c in space.choices if space.level(c) == mildest])
    best, _ = exploration.best() or min(found, key=lambda pair: found[pair].estimate.memory.demand)
    changed = space.numerics(space.recipe_for(best, 1))
    if not changed:
        return gpu, text, ""
    level, states = space.level(best), space.states(best)
    alike = [choice for choice in space.choices if space.level(choice) == level and space.states(choice) == states]
    _, other = _smallest(exploration, catalogue, margin, alike)
    return gpu, text, other and f"With {' and '.join(changed)}, which {changing(changed).split()[-1]} numerics: {other}"


def _smallest(
    exploration: Exploration, catalogue: Sequence[Device], margin: Margin, choices: Sequence[Choice]
) -> tuple[Device | None, str]:
    """The smallest GPU for the thriftiest of some combinations, and that as a sentence."""
    space, device = exploration.space, exploration.device
    cheap = [choice for choice in choices if space.trace_cost(choice) == 1]
    if cheap or not any(choice in choices for choice, _ in exploration.found):
        with contextlib.suppress(TraceBudgetExceeded):
            exploration.evaluate([(space.least_memory(cheap or choices), exploration.sizes[0])])
    known = [found for (choice, _), found in exploration.found.items()
             if choice in choices and not (cheap and found.recipe.offloaded.needs_by_block)]
    if not known:
        return None, "The smallest GPU is not known: the limit on traces was reached."
    least = min(known, key=lambda found: found.estimate.memory.used)
    fits, too_small, beyond = least.fit_rank.fits, "", 0
    if least.estimate.memory.host_missing:
        return None, ""  # which no GPU mends
    for gpu in sorted(catalogue, key=lambda d: (d.memory_bytes, d.name)):
        if fits and gpu.memory_bytes >= device.memory_bytes:
            break
        if gpu.memory_bytes <= beyond or least.estimate.memory.needed + margin.of(gpu) > gpu.memory_bytes:
            continue
        there = _as_usual_there(space.recipe, least.recipe, gpu)
        if there.refusals(gpu):
            continue
        dear = trace_cost(there) > 1
        try:
            cost = least if dear else exploration.evaluate_one(there, f"whether {gpu.name} would do", gpu)
        except TraceBudgetExceeded:
            tried = f"{too_small} is too small, and l" if too_small else "L"
            return None, f"{tried}arger GPUs of the catalogue were not traced: the limit on traces was reached."
        if cost is None:
            continue
        if dear or cost.estimate.safe:
            used_too = {"parallel": there.parallel.process_count > 1, "offload": there.offloaded.uses_host,
                        "precision": there.precision != least.recipe.precision}
            usual = (MICRO, "checkpointing") if space.recipe.mode == "train" else ("precision", "attention")
            shown = (*usual, *(field for field, is_used in used_too.items() if is_used))
            several = f"{device.world} x " if device.world > 1 else ""
            by = f", by this {device.name}'s trace" if dear else ""
            used = size(min(cost.estimate.memory.used, gpu.memory_bytes))
            return gpu, (f"{several}{gpu.name} ({size(gpu.memory_bytes)}) is the smallest that can "
                         f"{_does(space.recipe)}: {used} with CUDA context, at {choices_text(there, None, shown)}{by}.")
        too_small, beyond = gpu.name, max(gpu.memory_bytes, cost.estimate.memory.needed)
    if fits:
        return device, f"No smaller GPU of the catalogue than {device.name} would do."
    return None, f"No GPU of the catalogue was found that can {_does(space.recipe)}."


def _does(recipe: Recipe) -> str:
    """The use that a GPU is asked for, as the end of a sentence."""
    return "train this" if recipe.mode == "train" else "run this"


def _as_usual_there(asked: Recipe, recipe: Recipe, gpu: Device) -> Recipe:
    """The recipe as `auto` would have it on that GPU: where a technique that was left open is not for it, what is usual
    there, as long as that is no harsher."""
    if not recipe.refusals(gpu):
        return recipe
    usual = resolve(asked, gpu)
    changes = {slot: getattr(usual, slot) for slot in SLOTS if getattr(asked, slot) == "auto"
               and getattr(recipe, slot).refuse(recipe, gpu) and not getattr(recipe, slot).numerics_change}
    return recipe.model_copy(update=changes)


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
    best = exploration.largest(resolve(opened, device).model_copy(update=kept),
                                            [size for size in micro_batch_sizes(recipe.batch_size) if size <= most])
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
