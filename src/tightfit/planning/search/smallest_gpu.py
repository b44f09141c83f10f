"""The smallest GPU on which a stated recipe fits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Margin
from tightfit.planning.search.explain import changing
from tightfit.planning.search.exploration import MICRO, Exploration, Pair, Spent
from tightfit.planning.search.space import Level, named, trace_cost
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS
from tightfit.text import size

GPUS_TRACED = 3
"""GPUs that traces are made for, at most."""


def smallest_gpu(
    exploration: Exploration, catalogue: Sequence[Device], margin: Margin
) -> tuple[Device | None, str, str]:
    """The smallest GPU of the catalogue on which the recipe as written fits; that as a sentence, and the same of the
    choice where it changes numerics."""
    space = exploration.space
    if exploration.device.kind != "cuda" or not catalogue or space.recipe.backend.compiles_whole_steps:
        return None, "", ""
    gpu, text = _smallest(exploration, catalogue, margin, exploration.levels[0])
    best = exploration.best() or min(exploration.found, key=lambda pair: exploration.found[pair].estimate.missing)
    changed = space.numerics(exploration.found[best].recipe)
    if not changed:
        return gpu, text, ""
    _, other = _smallest(exploration, catalogue, margin, space.level(best[0]), best)
    return gpu, text, (f"With {' and '.join(changed)}, which {changing(changed).split()[-1]} numerics: "
                       f"{other[0].lower()}{other[1:]}")


def _smallest(
    exploration: Exploration, catalogue: Sequence[Device], margin: Margin, level: Level, stated: Pair | None = None
) -> tuple[Device | None, str]:
    """For one level of numerics; `stated`: a combination of it whose states are to be kept."""
    space, device = exploration.space, exploration.device
    states = None if stated is None else space.states(stated[0])
    choices = [c for c in space.choices if space.level(c) == level and states in (None, space.states(c))]
    cheap = [c for c in choices if space.cost(c) == 1]
    with contextlib.suppress(Spent):
        if cheap or not any(c in choices for c, _ in exploration.found):
            floor = space.floor(cheap or choices, stated[0] if stated else None)
            exploration.evaluate([(floor, exploration.sizes[0])])
    known = [found for (choice, _), found in exploration.found.items() if choice in choices]
    if not known:
        return None, "The smallest GPU is not known: the limit on traces was reached."
    exploration.left = GPUS_TRACED
    least = min(known, key=lambda found: found.estimate.memory.used)
    fits, too_small, beyond = least.fit_rank < 3, "", 0
    for gpu in sorted(catalogue, key=lambda d: (d.memory_bytes, d.name)):
        if fits and gpu.memory_bytes >= device.memory_bytes:
            break
        if gpu.memory_bytes <= beyond or least.estimate.memory.needed + margin.of(gpu) > gpu.memory_bytes:
            continue
        there = _on(space.recipe, least.recipe, gpu)
        if there.refusals(gpu):
            continue
        dear = trace_cost(there) > 1
        try:
            cost = least if dear else exploration.cost(there, f"whether {gpu.name} would do", gpu)
        except Spent:
            tried = f"{too_small} is too small, and l" if too_small else "L"
            return None, f"{tried}arger GPUs of the catalogue were not traced: the limit on traces was reached."
        if cost is None:
            continue
        if dear or cost.estimate.safe:
            shown = (MICRO, "checkpointing") if space.recipe.mode == "train" else ("precision", "attention")
            by = f", by this {device.name}'s trace" if dear else ""
            return gpu, (f"The smallest GPU on which the recipe as written fits is {gpu.name} "
                         f"({size(gpu.memory_bytes)}): {size(cost.estimate.memory.used)} in use with "
                         f"{named(there, None, shown)}{by}.")
        too_small, beyond = gpu.name, max(gpu.memory_bytes, cost.estimate.memory.needed)
    if fits:
        return device, f"No smaller GPU of the catalogue than {device.name} would do."
    return None, "No GPU of the catalogue was found on which the recipe as written fits."


def _on(asked: Recipe, recipe: Recipe, gpu: Device) -> Recipe:
    """The recipe as `auto` would have it on that GPU: where a technique that was left open is not for it, what is usual
    there, as long as that is no harsher."""
    if not recipe.refusals(gpu):
        return recipe
    usual = resolve(asked, gpu)
    changes = {slot: getattr(usual, slot) for slot in SLOTS if getattr(asked, slot) == "auto"
               and getattr(recipe, slot).refuse(recipe, gpu) and not getattr(recipe, slot).harshness}
    return recipe.model_copy(update=changes)
