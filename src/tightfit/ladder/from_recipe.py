"""A ladder of a person's own recipe: plain, each technique alone, then the plan's choice of all."""

from __future__ import annotations

from typing import Any

from tightfit.errors import RecipeError
from tightfit.ladder.rungs import PLAIN, Ladder, Rung, setting_alone, setting_name
from tightfit.models import resolve_source
from tightfit.recipe import CHOICES, Recipe
from tightfit.recipe.yaml import technique_to_yaml
from tightfit.techniques import SLOTS, Technique
from tightfit.training.run_folder import folder_name

HALVINGS = 4
"""How often the global batch is halved: each time, a micro-batch that is tried."""
FEATURE_OF = {"precision": "mixed precision", "checkpointing": "gradient checkpointing",
              "optimizer": "optimizer choice", "attention": "SDPA", "compile": "torch.compile"}  # fmt: skip
"""The guides' names of the slots; they have none for the loss."""
BASELINE = "plain"


def ladder_of(recipe: Recipe, name: str) -> Ladder:
    """The recipe's ladder. What it pins stays; every field that it leaves `auto` is varied.

    The baseline takes PLAIN's choice of each open slot, and the whole batch at once; of a factory's model, which may
    compute attention itself, `sdpa`, which keeps that. Raises RecipeError for a recipe that trains nothing or leaves
    nothing open.
    """
    if recipe.mode != "train":
        raise RecipeError("mode: 'inference' is for planning, and a ladder is of training; write mode=train")
    open_fields = recipe.open_choices()
    if not open_fields:
        raise RecipeError(f"{', '.join(CHOICES)}: all are pinned, so that there is nothing to compare; write auto for "
                          "one, such as checkpointing=auto")
    slots = [slot for slot in SLOTS if slot in open_fields]
    made = "attention" in slots and resolve_source(recipe).kind == "factory"
    plain = {**PLAIN, "attention": "sdpa"} if made else PLAIN
    base = {**recipe.to_dict(), **{slot: plain[slot] for slot in slots}}
    rungs = [Rung(name=BASELINE)]
    if "micro_batch_size" in open_fields:
        base["micro_batch_size"] = recipe.batch_size
        halves = [recipe.batch_size >> times for times in range(1, HALVINGS + 1)]
        rungs += [Rung(name=f"micro-batch {size}", changes={"micro_batch_size": size}, against=BASELINE,
                       feature="gradient accumulation") for size in halves if size]
    for slot in slots:
        rungs += [Rung(name=f"{slot} {setting_name(setting)}", changes=_alone(setting, recipe), against=BASELINE,
                       feature=None if made and slot == "attention" else FEATURE_OF.get(slot))
                  for technique in SLOTS[slot] for setting in technique.rungs()
                  if technique_to_yaml(setting) != plain[slot]]
    rungs.append(Rung(name="combined, as the plan chooses", against=BASELINE,
                      changes=dict.fromkeys(open_fields, "auto")))
    chosen = {field: getattr(recipe, field) for field in CHOICES if field not in open_fields}
    pinned = [f"{field}={getattr(value, 'name', value)}" for field, value in chosen.items()]
    notes = (f"pinned in every rung: {', '.join(pinned)}",) if pinned else ()
    if made:
        notes = (*notes, "attention=sdpa where nothing else is said: attention that a module computes itself stays")
    return Ladder(name=folder_name(name), title=f"{recipe.model}, {recipe.task}: plain, each technique alone, combined",
                  base=base, rungs=tuple(rungs), notes=notes)


def _alone(setting: Technique, recipe: Recipe) -> dict[str, Any]:
    """The changes that make the technique alone, where the recipe leaves them open."""
    return {field: value for field, value in setting_alone(setting).items() if getattr(recipe, field) == "auto"}
