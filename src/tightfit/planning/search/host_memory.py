"""What waits in the host's memory: shares of blocks that stay on the device, and what a plan says of it."""

from __future__ import annotations

import math
from collections.abc import Collection

from tightfit.backends.measurements import ModelSize
from tightfit.devices import Device
from tightfit.planning.plan import Plan
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.wording import choices_text
from tightfit.recipe import Recipe
from tightfit.techniques.offload import STREAMED, Host, NoOffload, Offload
from tightfit.text import size

OFFLOAD = "offload"
KINDS = ("weights", "gradients", "optimizer", "activations")
"""Kinds of memory that may stay on the device, first what saves most copies for its bytes."""


def evaluate_shares(exploration: Exploration) -> None:
    """Evaluate the choice with so much of its blocks on the device as that has room for, where its copies are waited
    for; where nothing fits, so what lacks host memory alone. Raises TraceBudgetExceeded."""
    best, space = exploration.best(), exploration.space
    if OFFLOAD not in space.fields:
        return
    asked = space.recipe.offload
    kinds = KINDS if asked == "auto" else asked.open_shares
    for choice, micro in [best] if best is not None else list(exploration.found):
        offload = with_shares(exploration.found[choice, micro], kinds)
        if offload is not None:
            exploration.evaluate([(space.with_value(choice, OFFLOAD, offload), micro)])


def with_shares(found: Evaluated, kinds: Collection[str]) -> Offload | None:
    """The offloading of what was evaluated with so much of some kinds on the device as that has room for, weights
    first. None where host memory suffices and copies are not waited for, and where there is no room."""
    memory, time, offload = found.estimate.memory, found.estimate.time, found.recipe.offload
    waits = time.copies is not None and time.copies.speed < 1 - CLOCK_ERROR
    if offload == "auto" or memory.missing or not (memory.host_missing or waits):
        return None
    room, shares, lacking = memory.capacity - memory.margin - memory.peak_reserved, {}, memory.host_missing
    for kind in (kind for kind in KINDS if kind in kinds):
        held = memory.host_by_category.get(kind, 0)
        if held and room > 0:
            shares[kind] = math.ceil(100 * (1 - min(room / held, 1.0))) / 100
            moved = round((1 - shares[kind]) * held)
            room, lacking = room - moved, lacking - moved
    changed = offload.with_shares(shares)
    return None if lacking > 0 or changed == offload else changed


def notes_on_host_memory(exploration: Exploration, best: Pair) -> list[str]:
    """Notes on a choice that keeps something in host memory."""
    space, found = exploration.space, exploration.found[best]
    if OFFLOAD not in space.fields or not found.recipe.offloaded.uses_host:
        return []
    notes = []
    if not any(other.fit_rank.fits and not other.recipe.offloaded.needs_by_block
               for other in exploration.found.values()):
        fields = choices_text(found.recipe, None, tuple(STREAMED))
        notes.append(f"nothing fits with all of the model in the GPU's memory: with {fields}, part of it waits in the "
                     "host's; write offload=none for what would help without")
    if exploration.levels[-1] != space.level(best[0]) and not space.recipe.allow_numerics:
        notes.append("optimizer states wait in the host's memory with results as they always are; allow_numerics=true "
                     "also considers 8-bit states and 16-bit weights, which may fit without and be faster")
    return notes


def enough_host_memory(exploration: Exploration) -> str:
    """The least memory of the host with which something would fit that lacks nothing else, as a sentence; empty where
    there is none."""
    device = exploration.device
    short = [found for found in exploration.found.values()
             if found.estimate.memory.host_missing and not found.estimate.memory.missing]
    if not short:
        return ""
    least = min(short, key=lambda found: found.estimate.memory.host_needed)
    fields = choices_text(least.recipe, None, ("precision", "optimizer", *STREAMED))
    return (f"{size(least.estimate.memory.host_needed)} of host memory would do, of which {device.name}'s machine has "
            f"{size(device.host_bytes)}: with {fields}, it fits.")


def keeps_all(recipe: Recipe, device: Device) -> str:
    """A sentence for a recipe that pins all of a model to the GPU though it could be offloaded; empty for others."""
    settings = Host.search_settings(recipe, device) if recipe.mode == "train" and recipe.offload == NoOffload() else []
    possible = [one for one in settings if not recipe.model_copy(update={OFFLOAD: one}).refusals(device)]
    return "offload=none keeps all of the model on the GPU; write offload=auto." if possible else ""


def experts_stay(plan: Plan, experts: ModelSize) -> list[str]:
    """The reason why a mixture of experts' weights leave the GPU last, where anything waits in host memory."""
    if plan.chosen is None or not plan.chosen.recipe.offloaded.uses_host:
        return []
    times = experts.parameters / experts.active_parameters
    return [f"a token meets {experts.active_parameters:,} of {experts.parameters:,} parameters: copies of weights are "
            f"{times:.1f} times the bytes for each FLOP that they are without experts, so weights leave the GPU after "
            "gradients and optimizer states"]
