"""Smallest GPU: of the catalogue, the one with the least memory on which a recipe fits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.choose import choose
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import Exploration
from tightfit.planning.search.space import Combination, trace_cost
from tightfit.planning.search.wording import changing, choices_text
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS
from tightfit.text import size


def smallest_gpu(exploration: Exploration, catalogue: Sequence[Device]) -> tuple[Device | None, str, str]:
    """The smallest GPU of the catalogue on which the recipe fits, by the combination of least memory whose numerics are
    mildest; that as a sentence, and the same of the choice where its numerics are harsher."""
    space, found = exploration.space, exploration.found
    if not catalogue or exploration.device.kind != "cuda" or space.recipe.backend.compiles_whole_steps:
        return None, "", ""
    gpu, text = _smallest(exploration, catalogue, space.mildest)
    best, _ = choose(exploration) or min(found, key=lambda pair: found[pair].estimate.memory.demand)
    changed = space.numerics(space.recipe_for(best, 1))
    if not changed:
        return gpu, text, ""
    level, states = space.level(best), space.states(best)
    alike = [choice for choice in space.combinations if space.level(choice) == level and space.states(choice) == states]
    _, other = _smallest(exploration, catalogue, alike or [best])  # whose shares in host memory are none of the space's
    return gpu, text, other and f"With {' and '.join(changed)}, which {changing(changed).split()[-1]} numerics: {other}"


def _smallest(
    exploration: Exploration, catalogue: Sequence[Device], choices: Sequence[Combination]
) -> tuple[Device | None, str]:
    """The smallest GPU for the one of some combinations that needs least memory, and that as a sentence."""
    space, device = exploration.space, exploration.device
    cheap = space.cheap(choices)
    if cheap or not any(choice in choices for choice, _ in exploration.found):
        with contextlib.suppress(TraceBudgetExceeded):
            exploration.evaluate([(space.least_memory(cheap or choices), exploration.sizes[0])])
    known = [found for (choice, _), found in exploration.found.items()
             if choice in choices and not (cheap and found.recipe.offloaded.needs_by_block)]
    if not known:
        return None, "The smallest GPU is not known: the limit on traces was reached."
    streams = cheap and any(map(space.needs_by_block, choices))
    resident = " with no block in host memory" if streams else ""
    least = min(known, key=lambda found: found.estimate.memory.used)
    fits, too_small, traced = least.fit_rank.fits, "", [(device, least)]
    if least.estimate.memory.host_missing:
        return None, ""  # which no GPU mends
    for gpu in sorted(catalogue, key=lambda d: (d.memory_bytes, d.name)):
        if fits and gpu.memory_bytes >= device.memory_bytes:
            break
        there = _as_usual_there(space.recipe, least.recipe, gpu)
        dear = trace_cost(there) > 1
        needs = least.estimate.memory.needed if dear else max(_needs_at_least(each, on, gpu) for on, each in traced)
        if needs + exploration.margin.of(gpu) > gpu.memory_bytes or there.refusals(gpu):
            continue
        try:
            cost = least if dear else exploration.evaluate_one(there, f"whether {gpu.name} would do", gpu)
        except TraceBudgetExceeded:
            tried = f"{too_small} is too small, and l" if too_small else "L"
            return None, f"{tried}arger GPUs of the catalogue were not traced: the limit on traces was reached."
        if cost is None:
            continue
        if dear or cost.fit_rank.is_safe:
            used_too = {"parallel": there.parallel.process_count > 1, "offload": there.offloaded.uses_host,
                        "precision": there.precision != least.recipe.precision}
            trains = space.recipe.mode == "train"
            usual = ("micro_batch_size", "checkpointing") if trains else ("precision", "attention")
            shown = (*usual, *(field for field, is_used in used_too.items() if is_used))
            several = f"{device.world} x " if device.world > 1 else ""
            by = f", by this {device.name}'s trace" if dear else ""
            used = size(min(cost.estimate.memory.used, gpu.memory_bytes))
            return gpu, (f"{several}{gpu.name} ({size(gpu.memory_bytes)}) is the smallest that can "
                         f"{_does(space.recipe)}{resident}: {used} with CUDA context, at "
                         f"{choices_text(there, None, shown)}{by}."
                         + _with_blocks(exploration, catalogue, choices, gpu.memory_bytes) * bool(streams))
        too_small = gpu.name
        traced.append((gpu, cost))
    blocks = _with_blocks(exploration, catalogue, choices, device.memory_bytes) * bool(streams)
    if fits:
        return device, f"No smaller GPU of the catalogue than {device.name} would do{resident}.{blocks}"
    return None, f"No GPU of the catalogue was found that can {_does(space.recipe)}{resident}.{blocks}"


def _with_blocks(
    exploration: Exploration, catalogue: Sequence[Device], choices: Sequence[Combination], below: int
) -> str:
    """The sentence on a GPU of less memory than `below` that trains this with blocks in host memory: the smallest that
    a recipe fits which was evaluated, of the numerics of `choices`; or that there may be one."""
    space, device = exploration.space, exploration.device
    streamed = [found for (choice, _), found in exploration.found.items() if found.fit_rank.is_safe
                and found.recipe.offloaded.needs_by_block and space.level(choice) == space.level(choices[0])]
    for gpu in sorted(catalogue, key=lambda d: (d.memory_bytes, d.name)):
        room = gpu.memory_bytes - exploration.margin.of(gpu)
        fitting = [found.estimate.memory for found in streamed
                   if found.estimate.memory.used <= room and not found.recipe.refusals(gpu)]
        if fitting and gpu.memory_bytes < below:
            least = min(fitting, key=lambda memory: memory.host)
            return (f" With blocks there a smaller one does, such as {gpu.name} ({size(gpu.memory_bytes)}) beside "
                    f"{size(least.host)} of host memory, by this {device.name}'s trace.")
    return " With blocks there a smaller one may do."


def _needs_at_least(found: Evaluated, card: Device, gpu: Device) -> int:
    """The bytes that a GPU needs besides its context for what was evaluated on a card: one that is full gives cached
    memory back first, and one with flash attention may need less than a card without."""
    memory = found.estimate.memory
    if gpu.has_flash and not card.has_flash:
        return found.held
    return memory.capacity + memory.missing if memory.missing else memory.peak_allocated


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
               and any(getattr(recipe, slot).refuse(recipe, gpu)) and not getattr(recipe, slot).numerics_change}
    return recipe.model_copy(update=changes)
