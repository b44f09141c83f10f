"""Search over streamed recipes, whose blocks wait in the host's memory, where nothing fits without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tightfit.backends.measurements import ModelSize
from tightfit.devices import Device
from tightfit.planning.costs import FitRank, Memory
from tightfit.planning.plan import Candidate, Plan
from tightfit.planning.search.exploration import CLOCK_ERROR, MICRO, Exploration, Pair
from tightfit.planning.search.host_shares import KINDS, OFFLOAD
from tightfit.planning.search.space import Choice, Level, Space, micro_batch_sizes
from tightfit.planning.search.wording import changing, choices_text
from tightfit.recipe import Recipe
from tightfit.techniques import default_for_slot
from tightfit.techniques.offload import STREAMED, Host, NoOffload
from tightfit.techniques.parallel import undivided_bytes
from tightfit.text import size

OFFLOADED: Mapping[str, Any] = {**dict.fromkeys(KINDS, "auto"), "name": "host"}
"""Blocks in host memory, with shares that the search decides."""
LEAST_MEMORY: Mapping[str, Any] = {"checkpointing": "every-block", "loss": "chunked", "compile": "off"}
"""The values tried first of the fields that are open: those of least memory, and of least time to trace."""
REFINED: tuple[dict[str, Any], ...] = (
    {"compile": "per-block"}, {"compile": "per-block", "checkpointing": {"name": "selective", "keep": "attention"}},
)
"""The values tried then, of the fields that are open."""
MOST_TOKENS = 1 << 17
"""Tokens of a micro-batch, at most: larger ones are no faster, and their losses come in many chunks."""
TRACES = 24
"""Traces of each search for a streamed recipe, at most."""
NUMERICS = ("precision", "optimizer")
"""The fields that may change results."""
NEARLY = 0.9
"""Share of the host memory that declared bytes speak of which is needed at least."""
MILD = (
    "optimizer states wait in the host's memory with results as they always are; allow_numerics=true also considers "
    "8-bit states and 16-bit weights, which may fit without and be faster"
)


def plan_streamed(
    recipe: Recipe, device: Device, resident: Plan | None, plan_of: Callable[[Recipe], Plan]
) -> Plan | None:
    """The plan of the recipe with its blocks in host memory. None where nothing fits so, or is faster than without by
    more than the clock's error, or keeps numerics as they are where nothing else does.

    resident: its plan without, if anything fits; one that recomputes though optimizer states are in host memory is
    short of memory, and so is one that changes numerics unasked; else there is nothing to gain. plan_of: plans a
    recipe, by few traces and without answers.
    """
    chosen = None if resident is None else resident.chosen
    short = chosen is None or changes_unasked(chosen, recipe) or (
        chosen.recipe.offloaded.uses_host and _recomputes(chosen.recipe))
    first = _first_that_fits(recipe, device, plan_of) if short else None
    if first is None or first.chosen is None:
        return None
    best, at = first, first.chosen.recipe.override(offload=first.asked.to_dict()[OFFLOAD])  # its shares open again
    for fields in REFINED:
        refined = at.override(**{field: value for field, value in fields.items() if getattr(recipe, field) == "auto"})
        if refined != at and not refined.refusals(device):
            best = better(best, plan_of(refined))
    best = replace(best, asked=recipe, candidates=tuple(marked(found, recipe) for found in best.candidates))
    best = replace(best, chosen=best.candidates[0])
    if picked := best.candidates[0].changes_numerics:
        best = replace(best, notes=(f"{changing(picked)} numerics: picked because nothing fits otherwise", *best.notes))
    if resident is None:
        noted = [nothing_resident(best.recipe)] if recipe.offload == "auto" else []
        return replace(best, notes=(*noted, *best.notes))
    assert chosen is not None
    changes, changes_without = best.candidates[0].numerics_change, chosen.numerics_change
    if recipe.allow_numerics or changes == changes_without:
        stays = better(resident, best) is resident
    else:
        stays = changes > changes_without
    if stays:
        return None
    if changes < changes_without:
        best = replace(best, answers=replace(best.answers, why="The fastest that fits with numerics as they are."))
    beside = (*best.candidates, *(found for found in resident.candidates if found.estimate.fits != "no"))
    answers = replace(best.answers, more_gpus=best.answers.more_gpus and resident.answers.more_gpus)
    return replace(best, candidates=beside, answers=answers, notes=(*best.notes, *resident.notes))


def _first_that_fits(recipe: Recipe, device: Device, plan_of: Callable[[Recipe], Plan]) -> Plan | None:
    """The first plan with a choice, with numerics as they usually are where something fits so, else with the mildest
    change that serves with the margin free: of each level the one that needs least memory."""
    recipe = with_least_memory(recipe)
    short: list[tuple[float, Memory]] = []

    def tried(other: Recipe) -> Plan:
        plan = plan_of(other)
        memory = plan.candidates[0].estimate.memory
        if memory.host_missing:
            short.append((undivided_bytes(other), memory))
        return plan

    def may_have_room(other: Recipe) -> bool:
        return all(NEARLY * memory.host * undivided_bytes(other) / each
                   <= memory.host - memory.host_missing + memory.capacity for each, memory in short)

    def with_numerics_of(choices: Sequence[Choice]) -> Recipe:
        least = space.recipe_for(space.least_memory(choices), 1)
        return recipe.model_copy(update={slot: getattr(least, slot) for slot in open_slots})

    if recipe.mode != "train":
        return None
    open_slots = [slot for slot in NUMERICS if getattr(recipe, slot) == "auto"]
    usual = recipe.model_copy(update={slot: default_for_slot(recipe, device, slot) for slot in open_slots})
    plan = _largest_that_fits(usual, device, tried)
    if not open_slots or (plan is not None and _is_safe(plan)):
        return plan
    space = Space(recipe.override(offload="none"), device)
    by_level: dict[Level, list[Choice]] = {}
    for choice in space.choices:
        by_level.setdefault(space.level(choice), []).append(choice)
    asked = [usual]
    for level in sorted(by_level):
        changed = with_numerics_of(by_level[level])
        waits_there = not short and changed.precision in [other.precision for other in asked]  # what differs
        if waits_there or not may_have_room(changed):
            continue
        asked.append(changed)
        found = _largest_that_fits(changed, device, tried)
        if found is not None and _is_safe(found):
            return found
        plan = plan or found
    least = with_numerics_of(space.choices)
    if short and plan is None and least not in asked:
        return _largest_that_fits(least, device, tried)  # which says how much would do
    return plan


def _largest_that_fits(recipe: Recipe, device: Device, plan_of: Callable[[Recipe], Plan]) -> Plan | None:
    """The plan of the largest micro-batch with which a choice fits; with the embeddings in host memory as well where
    none does."""
    sizes = micro_batch_sizes(recipe.batch_size) if recipe.micro_batch_size == "auto" else [recipe.micro_batch_size]
    sizes = [micro for micro in sizes if micro * recipe.seq_len <= MOST_TOKENS] or sizes[:1]
    offloads = [OFFLOADED, {**OFFLOADED, "embeddings": True}] if recipe.offload == "auto" else [recipe.offload]
    first: Plan | None = None
    most: float = sizes[-1]
    for offload in offloads:
        peaks: list[tuple[int, int]] = []
        for micro in reversed(sizes):
            if micro > most:
                continue
            pinned = recipe.override(**{OFFLOAD: offload, MICRO: micro})
            if pinned.refusals(device):
                return first
            found = plan_of(pinned)
            if first is not None:
                return better(first, found)
            memory, tried = found.candidates[0].estimate.memory, micro
            if found.chosen is not None:
                if _is_safe(found):
                    return found
                first, most = found, micro / 2  # a smaller micro-batch may leave room
            elif memory.host_missing > memory.host_by_category.get("activations", 0):
                return first  # which neither a smaller micro-batch nor embeddings there mend
            else:
                peaks.append((micro, memory.peak_allocated))
                kept = pinned.offloaded.activations < 1  # of all that goes through together
                most = max(_most_that_may_fit(peaks[-1:] if kept else peaks, memory.capacity), sizes[0] if kept else 0)
        most = tried
    return first


def _is_safe(plan: Plan) -> bool:
    return plan.chosen is not None and plan.chosen.estimate.fit_rank is FitRank.SAFE


def _most_that_may_fit(peaks: Sequence[tuple[int, int]], capacity: int) -> float:
    """The largest micro-batch that may fit, from peaks of those that do not, the last two: a peak is the largest of
    several sums that grow with the micro-batch, so that a line through two lies below it left of them."""
    (larger, above), (smaller, below) = peaks[-2:] if len(peaks) > 1 else (peaks[0], (0, 0))
    if above <= below:
        return 0.0
    return smaller + (capacity - below) * (larger - smaller) / (above - below)


def with_least_memory(recipe: Recipe) -> Recipe:
    """The recipe with what it leaves open of `LEAST_MEMORY` set."""
    changes = {field: value for field, value in LEAST_MEMORY.items() if getattr(recipe, field) == "auto"}
    return recipe.override(**changes)


def streams_as_asked(recipe: Recipe) -> bool:
    """Whether a recipe as written keeps blocks in host memory, whose traces are long, and leaves open what decides how
    much of them is kept on the device."""
    return recipe.offloaded.needs_by_block and recipe.checkpointing == "auto"


def changes_unasked(chosen: Candidate, asked: Recipe) -> bool:
    """Whether a choice changes numerics, which the recipe as asked does not allow, for want of memory."""
    return bool(chosen.changes_numerics) and not asked.allow_numerics


def _recomputes(recipe: Recipe) -> bool:
    """Whether a resolved recipe's step computes anything again for its backward pass."""
    return recipe.checkpointing != "auto" and recipe.checkpointing.recomputes


def better(plan: Plan, other: Plan) -> Plan:
    """The other one where it is faster by more than the clock's error, or as fast and leaves more room; else the plan.
    One without a choice is never better."""
    if plan.chosen is None or other.chosen is None:
        return plan if other.chosen is None else other
    before, after = (found.chosen.estimate.time.samples_per_second for found in (plan, other) if found.chosen)
    roomier = other.chosen.estimate.fit_rank < plan.chosen.estimate.fit_rank
    return other if after > before * (1 + CLOCK_ERROR) ** (-1 if roomier else 1) else plan


def marked(found: Candidate, asked: Recipe) -> Candidate:
    """A candidate with what changes numerics among all that the recipe as asked for leaves open."""
    picked = [technique for slot in NUMERICS if getattr(asked, slot) == "auto"
              and (technique := getattr(found.recipe, slot)).numerics_change]
    return replace(found, changes_numerics=tuple(f"{technique.slot}={technique.name}" for technique in picked))


def notes(exploration: Exploration, best: Pair) -> list[str]:
    """Notes on a choice that keeps something in host memory."""
    space, uses_host = exploration.space, exploration.found[best].recipe.offloaded.uses_host
    harsher = exploration.levels[-1] != space.level(best[0]) and not space.recipe.allow_numerics
    return [MILD] if OFFLOAD in space.fields and uses_host and harsher else []


def nothing_resident(chosen: Recipe) -> str:
    """A sentence for a model of which nothing fits whole in the GPU's memory."""
    fields = choices_text(chosen, None, tuple(STREAMED))
    return (f"nothing fits with all of the model in the GPU's memory: with {fields}, part of it waits in the host's; "
            "write offload=none for what would help without")


def enough_host_memory(tried: Sequence[Plan], device: Device) -> str:
    """The least memory of the host with which a streamed plan would fit that lacks nothing else, as a sentence; empty
    where there is none."""
    nearest = [plan.candidates[0] for plan in tried if plan.chosen is None]
    short = [found for found in nearest if found.estimate.memory.host_missing and not found.estimate.memory.missing]
    if not short:
        return ""
    least = min(short, key=lambda found: found.estimate.memory.host_needed)
    fields = choices_text(least.recipe, None, (*NUMERICS, *STREAMED))
    return (f"{size(least.estimate.memory.host_needed)} of host memory would do, of which {device.name}'s machine has "
            f"{size(device.host_bytes)}: with {fields}, it fits.")


def experts_stay(plan: Plan, experts: ModelSize) -> list[str]:
    """The reason why a mixture of experts' weights leave the GPU last, where anything waits in host memory."""
    if plan.chosen is None or not plan.chosen.recipe.offloaded.uses_host:
        return []
    times = experts.parameters / experts.active_parameters
    return [f"a token meets {experts.active_parameters:,} of {experts.parameters:,} parameters: copies of weights are "
            f"{times:.1f} times the bytes for each FLOP that they are without experts, so weights leave the GPU after "
            "gradients and optimizer states"]


def keeps_all(exploration: Exploration) -> str:
    """A sentence for a recipe that pins all of a model to the GPU though it could be offloaded; empty for others."""
    recipe, device = exploration.space.recipe, exploration.device
    settings = Host.search_settings(recipe, device) if recipe.mode == "train" and recipe.offload == NoOffload() else []
    possible = [one for one in settings if not recipe.model_copy(update={OFFLOAD: one}).refusals(device)]
    return "offload=none keeps all of the model on the GPU; write offload=auto." if possible else ""
