"""Adapters as a way out where a model does not fit when all of it is trained: what they would take, by a trace each."""

from __future__ import annotations

from tightfit.planning.defaults import resolve
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.exploration import Exploration
from tightfit.planning.search.wording import choices_text
from tightfit.text import size

ADAPTERS = {"LoRA": {"trainable": "lora", "base": "auto"}, "QLoRA": {"trainable": "lora", "base": "nf4"}}
"""Ways to train adapters alone, as a person writes them."""


def adapters(exploration: Exploration) -> str:
    """Memory of a recipe that trains all weights, with adapters instead, as a sentence; empty where none could serve.
    They are named, and never taken unasked."""
    space, recipe = exploration.space, exploration.space.recipe
    if recipe.mode != "train" or recipe.trainable.freezes or not recipe.backend.runs_torch:
        return ""
    whole = space.values["precision"][0]  # fp32 keeps no copies
    least = space.least_memory_recipe().model_copy(update={"precision": whole})
    found: list[str] = []
    parameters = max(evaluated.parameters for evaluated in exploration.found.values())
    for way in ADAPTERS.values():
        changed = resolve(least.override(**way, offload="none"), exploration.device)
        written = " ".join(f"{field}={value}" for field, value in way.items() if value != "auto")
        if changed.refusals(exploration.device):
            continue
        weights = changed.frozen_base.weight_bytes(changed) * parameters
        if weights > 2 * exploration.device.memory_bytes:  # which no trace need tell
            found.append(f"{written} would take more than {size(round(weights))}, which does not fit")
            continue
        try:
            cost = exploration.evaluate_one(changed, f"whether {written} would do")
        except TraceBudgetExceeded:
            break
        if cost is not None:
            used = size(cost.estimate.memory.used)
            found.append(f"{written} would take {used}" + ("" if cost.fit_rank.is_safe else ", which does not fit"))
    if not found:
        return ""
    rest = choices_text(least, None, ("micro_batch_size", "checkpointing"))
    return (f"{', and '.join(found)}, with {rest}: small factors are trained beside frozen weights, which "
            "changes what is learned.")
