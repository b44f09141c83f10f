"""Changes that would make a recipe fit, or go faster: one field, fields left open, offloading, padded dimensions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.alignment import Misalignment, dimensions, misaligned
from tightfit.planning.defaults import default_micro_batch, resolve
from tightfit.planning.largest import largest_that_fits
from tightfit.planning.offload import offload_advice
from tightfit.planning.plan import Change
from tightfit.planning.search.choose import Exploration
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.findings import CLOCK_ERROR, Spent
from tightfit.planning.search.space import Space, micro_batch_sizes, named
from tightfit.planning.suggestions import savings
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.techniques import SLOTS
from tightfit.text import size

CHANGES_TRACED = 12
"""Recipes traced at most for an answer."""
MICRO = "micro_batch_size"
FEW_OPEN = 2
"""Open fields up to which a recipe counts as pinned: Hugging Face's arguments say nothing of two."""


class Asking:
    """Questions beside a search: each recipe counts as one of its traces. traced: how many more may be made."""

    def __init__(self, exploration: Exploration, traced: int) -> None:
        self.exploration, self.traced = exploration, traced

    def cost(self, recipe: Recipe, device: Device | None = None, text: str = "") -> Evaluated | None:
        """Cost of a resolved recipe; None where it cannot be built. Raises Spent."""
        exploration = self.exploration
        there = device or exploration.device
        known = [*((exploration.device, found) for found in exploration.found.values()), *exploration.beside]
        for where, found in known:
            if where == there and found.recipe == recipe:
                return found
        if self.traced <= 0 or exploration.spent >= exploration.limit:
            raise Spent
        self.traced -= 1
        exploration.count(recipe, text)
        outcome = exploration.evaluator([(recipe, there)])[0]
        if not isinstance(outcome, Evaluated):
            return None
        exploration.beside.append((there, outcome))
        return outcome

    def largest(self, recipe: Recipe, sizes: Sequence[int], fields: Sequence[str] = (MICRO,)) -> Evaluated | None:
        """Cost of a resolved recipe with the largest of some sizes that fits with the margin; None where none does."""
        found: dict[int, Evaluated] = {}

        def needs(size: int) -> float:
            cost = self.cost(recipe.model_copy(update=dict.fromkeys(fields, size)), text=f"{fields[0]}={size}")
            if cost is None:
                return float("inf")
            found[size] = cost
            return cost.estimate.memory.used + cost.estimate.memory.margin

        with contextlib.suppress(Spent):
            largest_that_fits(sizes, needs, self.exploration.device.memory_bytes)
        return found[max(safe)] if (safe := [size for size, cost in found.items() if cost.estimate.safe]) else None


def smallest_change(exploration: Exploration) -> tuple[Change | None, str]:
    """The least change of one field with which something fits, by a trace of the thriftiest recipe of the rest, and
    that as a sentence.

    None where no single change helps, or where the limit on traces was reached before one did; the sentence then says
    so, and which changes would help together.
    """
    recipe, none = exploration.space.recipe, "No single change would make it fit"
    least = min(exploration.found.values(), key=lambda found: found.estimate.missing)
    room = exploration.room(spare=True)
    asking = Asking(exploration, CHANGES_TRACED)
    if recipe.mode == "inference":
        return _smaller_batch(asking, least)
    try:
        for changes, why in _changes(recipe, exploration.device):
            if "seq_len" in changes and least.held > room:
                break  # no shorter sequence changes what weights, gradients and states take
            found = _with(asking, least, changes, why)
            if found is not None:
                return found, f"The smallest that makes it fit: {found.text} ({found.why})."
        together = _together(asking, least)
    except Spent:
        return None, "No single change was found that would make it fit: the limit on traces was reached."
    if together is not None:
        return None, f"{none}; together these would: {together.text}{together.why}."
    if least.held > room:
        return None, (f"{none}: weights, gradients and optimizer states alone take {size(least.held)}, and "
                      f"{size(max(room, 0))} are left for them.")
    return None, f"{none}."


def _changes(recipe: Recipe, device: Device) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes of what is pinned, the smallest first, then a shorter sequence."""
    for saving in savings(recipe, device):
        yield {saving.field: saving.value}, saving.why
    shorter = recipe.seq_len // 2 if TASKS[recipe.task].reads == "tokens" else 0
    while shorter >= 128:
        yield {"seq_len": shorter}, "shorter sequences"
        shorter //= 2


def _with(asking: Asking, least: Evaluated, changes: dict[str, Any], why: str) -> Change | None:
    """The change, if the thriftiest recipe fits with it; of the micro-batch the largest that does."""
    exploration = asking.exploration
    space, device = exploration.space, exploration.device
    if MICRO in changes:
        pinned = least.recipe.micro_batch_size
        assert pinned != "auto"
        found = asking.largest(least.recipe, [m for m in micro_batch_sizes(space.recipe.batch_size) if m < pinned])
        text = "" if found is None else f"{MICRO}={found.recipe.micro_batch_size}"
    else:
        changed = least.recipe.override(**changes)
        text = " ".join(f"{field}={value}" for field, value in changes.items())
        if changed == least.recipe:
            return None
        found = None
        if changed.refusals(device):  # what a change needs of an open field, the search finds
            asked = space.recipe.override(**changes)
            if asked.refusals(device):
                return None
            try:
                opened = Space(asked, device)
                pinned = changed.micro_batch_size
                assert pinned != "auto"
                changed = opened.on(opened.floor(opened.choices), pinned)
            except Refused:
                return None
        found = asking.cost(changed, text=f"whether {text} would do")
    if found is None or not found.estimate.safe:
        return None
    resorted = _numerics(space, found.recipe, [*changes])
    return Change(text=text, why=why + (f"; with {resorted}, which changes numerics" if resorted else ""),
                  estimate=found.estimate)


def _numerics(space: Space, recipe: Recipe, but: Sequence[str]) -> str:
    return " and ".join(f"{field}={getattr(recipe, field).name}" for field in space.fields
                        if field in SLOTS and field not in but and getattr(recipe, field).harshness)


def _together(asking: Asking, least: Evaluated) -> Change | None:
    """Changes with which it fits: every pin that can save memory without changing numerics does."""
    recipe, device = asking.exploration.space.recipe, asking.exploration.device
    thrifty = {saving.field: saving.value for saving in savings(recipe, device) if "numerics" not in saving.why}
    if len(thrifty) < 2:
        return None
    thrifty.pop(MICRO, None)
    pinned = least.recipe.micro_batch_size
    assert pinned != "auto"
    whole = least.recipe.override(**thrifty)
    if whole.refusals(device):
        return None
    found = asking.largest(whole, [micro for micro in micro_batch_sizes(recipe.batch_size) if micro <= pinned])
    if found is None:
        return None
    return Change(text=named(found.recipe, least.recipe), why="", estimate=found.estimate)


def _smaller_batch(asking: Asking, nearest: Evaluated) -> tuple[Change | None, str]:
    """Of inference: the largest batch, halving, with which the nearest combination fits, and that as a sentence."""
    batches = [nearest.recipe.batch_size >> shift for shift in range(nearest.recipe.batch_size.bit_length())][:0:-1]
    found = asking.largest(nearest.recipe, batches, ("batch_size", MICRO))
    if found is None:
        return None, "No smaller batch would make it fit, not even batch_size=1."
    change = Change(text=f"batch_size={found.recipe.batch_size}", why="fewer at once", estimate=found.estimate)
    return change, f"The smallest that makes it fit: {change.text} ({change.why})."


def gain_of_opening(exploration: Exploration) -> str:
    """The gain of leaving fields open for a recipe that pins them all, as a sentence: by a trace or two of what `auto`
    stands for, so at least so much; empty where that is nothing worth saying."""
    recipe, device = exploration.space.recipe, exploration.device
    pinned = exploration.best()
    opened_already = recipe.open_choices()
    if pinned is None or recipe.mode != "train" or MICRO in opened_already or len(opened_already) > FEW_OPEN:
        return ""
    found = exploration.found[pinned]
    left_open = [slot for slot in SLOTS if Recipe.model_fields[slot].default == "auto"]
    opened = recipe.model_copy(update={**dict.fromkeys(left_open, "auto"), MICRO: "auto"})
    asking = Asking(exploration, 3)
    usual = resolve(opened, device)
    usual = usual.model_copy(update={slot: getattr(recipe, slot) for slot in SLOTS
                                     if getattr(recipe, slot) != "auto" and getattr(recipe, slot).harshness})
    sizes = micro_batch_sizes(recipe.batch_size)
    most = default_micro_batch(opened, device)
    if recipe.micro_batch_size != "auto":
        most = max(most, recipe.micro_batch_size)
    at = max((size for size in sizes if size <= most), default=sizes[0])
    best = asking.largest(usual, [size for size in sizes if size <= at])
    if best is None or best.speed <= (1 + CLOCK_ERROR) * found.speed:
        return ""
    fields = [field for field in (MICRO, *SLOTS) if getattr(best.recipe, field) != getattr(found.recipe, field)]
    time = best.estimate.time
    return (f"Left open, {', '.join(fields)} would gain: {time.throughput:,.0f} {time.unit} at least, instead of "
            f"{found.estimate.time.throughput:,.0f}, with {named(best.recipe, found.recipe)}.")


def offload(exploration: Exploration, host_bytes: int) -> str:
    """Bytes that ZeRO would move off the device, from the thriftiest trace of a recipe of which nothing fits."""
    least = min(exploration.found.values(), key=lambda found: found.passing)
    outside = sum(figure.bytes for figure in least.estimate.unseen if figure.where in ("context", "allocator"))
    return offload_advice(least.parameters, least.passing + outside, exploration.device.memory_bytes, host_bytes)


def misalignments(exploration: Exploration, best: Evaluated) -> tuple[Misalignment, ...]:
    """The chosen recipe's awkward dimensions, with the gain from padding by a trace of the padded recipe."""
    asking = Asking(exploration, 2)

    def gain(padded: Recipe) -> float | None:
        try:
            cost = asking.cost(padded, text="with padded dimensions")
        except Spent:
            return None
        return None if cost is None else 1 - cost.seconds / best.seconds

    try:
        dims = dimensions(best.recipe)
    except ModelError:  # a model of the caller's own
        return ()
    return misaligned(best.recipe, exploration.device, dims, gain)
