"""The ladders that have a name (ladders.yaml), that of a recipe, and the guides' table of techniques (guides.yaml)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import TypeAdapter

from tightfit.backends import load_backend
from tightfit.devices import MIB
from tightfit.errors import RecipeError
from tightfit.ladder.rungs import PLAIN_FIELDS, Figures, Ladder, Rung, setting_alone, setting_name
from tightfit.models import resolve_source
from tightfit.recipe import CHOICES, Recipe
from tightfit.recipe.yaml import technique_to_yaml
from tightfit.techniques import SLOTS, Technique
from tightfit.training.run_folder import folder_name

AUTO = dict.fromkeys(CHOICES, "auto")
"""The changes that leave every choice to the plan."""
HALVINGS = 4
"""Times that the global batch is halved: each time, a micro-batch that is tried."""
FEATURE_OF = {"precision": "mixed precision", "checkpointing": "gradient checkpointing",
              "optimizer": "optimizer choice", "attention": "SDPA", "compile": "torch.compile"}  # fmt: skip
"""The guides' names of the slots; they have none for the loss."""
BASELINE = "plain"


@dataclass(frozen=True, kw_only=True)
class Words:
    """Each guide's words on a technique: whether it improves speed, and memory. also: elsewhere in the guides."""

    speed: tuple[str, ...]
    memory: tuple[str, ...]
    also: str = ""


@dataclass(frozen=True, kw_only=True)
class Guides:
    """The guides that have a table of techniques, in the order of `Words`, and their words by technique."""

    guides: tuple[str, ...]
    features: Mapping[str, Words]


@cache
def guides() -> Guides:
    return TypeAdapter(Guides).validate_python(_read("guides.yaml"))


@cache
def ladders() -> Mapping[str, Ladder]:
    return {name: TypeAdapter(Ladder).validate_python(_whole(name, values))
            for name, values in _read("ladders.yaml").items()}


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath(name).read_text("utf-8"))
    return found


def _whole(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """A ladder's fields from its entry: the plain recipe below its base, and the rungs that `each` stands for."""
    steps = values.get("steps_published", 1)
    rungs = [rung | ({"changes": AUTO | rung.get("changes", {})} if "planned" in rung else {})
             | {"published": _published(steps, **rung.get("published", {}))} for rung in values["rungs"]]
    rungs += _each(**values["each"]) if "each" in values else []
    return {**values, "name": name, "base": PLAIN_FIELDS | values["base"], "rungs": rungs}


def _published(steps: int, seconds: float | None = None, memory_mib: float | None = None) -> Figures:
    """Published figures of a step. steps: that the seconds are of."""
    return Figures(seconds and seconds / steps, memory_mib and memory_mib * MIB)


def _each(slot: str, against: str, feature: str) -> Iterator[dict[str, Any]]:
    """Every setting of a slot but its first variant, alone and at the larger batch that it allows."""
    for technique in SLOTS[slot][1:]:
        for setting in technique.representative_settings():
            rung = {"name": setting_name(setting), "changes": setting_alone(setting), "against": against}
            yield {**rung, "feature": feature}
            yield {**rung, "name": f"{rung['name']}, larger batch", "grows": True}


def ladder_of(recipe: Recipe, name: str) -> Ladder:
    """The recipe's ladder. What it pins stays; every field that it leaves `auto` is varied.

    The baseline takes PLAIN_FIELDS' choice of each open slot, and the whole batch at once; of a factory's model, which
    may compute attention itself, `sdpa`, which keeps that. What the backend does not have makes no rung. Raises
    RecipeError for a recipe that trains nothing or leaves nothing open, and MissingLibrary.
    """
    if recipe.mode != "train":
        raise RecipeError("mode: 'inference' is for planning, and a ladder is of training; write mode=train")
    open_fields = recipe.open_choices()
    if not open_fields:
        raise RecipeError(f"{', '.join(CHOICES)}: all are pinned, so that there is nothing to compare; write auto for "
                          "one, such as checkpointing=auto")
    slots = [slot for slot in SLOTS if slot in open_fields and slot in CHOICES]
    made = "attention" in slots and resolve_source(recipe).kind == "factory"
    plain = {**PLAIN_FIELDS, "attention": "sdpa"} if made else PLAIN_FIELDS
    base = {**recipe.to_dict(), **{slot: plain[slot] for slot in slots}}
    rungs = [Rung(name=BASELINE)]
    if "micro_batch_size" in open_fields:
        base["micro_batch_size"] = recipe.batch_size
        halves = [recipe.batch_size >> times for times in range(1, HALVINGS + 1)]
        rungs += [Rung(name=f"micro-batch {size}", changes={"micro_batch_size": size}, against=BASELINE,
                       feature="gradient accumulation") for size in halves if size]
    alone = [Rung(name=f"{slot} {setting_name(setting)}", changes=_alone(setting, recipe), against=BASELINE,
                  feature=None if made and slot == "attention" else FEATURE_OF.get(slot))
             for slot in slots for technique in SLOTS[slot] for setting in technique.representative_settings()
             if technique_to_yaml(setting) != plain[slot]]
    absent = list[Rung]()
    if not recipe.backend.runs_torch:  # PyTorch has all that is compared
        backend = load_backend(recipe.backend.name)
        absent = [rung for rung in alone
                  if backend.absences(Recipe.from_dict({"backend": base["backend"], **rung.changes}))]
    rungs += [rung for rung in alone if rung not in absent]
    rungs.append(Rung(name="combined, as the plan chooses", against=BASELINE,
                      changes=dict.fromkeys(open_fields, "auto")))
    chosen = {field: getattr(recipe, field) for field in CHOICES if field not in open_fields}
    pinned = [f"{field}={getattr(value, 'name', value)}" for field, value in chosen.items()]
    notes = [f"pinned in every rung: {', '.join(pinned)}"] if pinned else []
    if absent:
        notes.append(f"no rungs, for backend: {recipe.backend.name} does not have them: "
                     + "; ".join(rung.name for rung in absent))
    if made:
        notes.append("attention=sdpa where nothing else is said: attention that a module computes itself stays")
    return Ladder(name=folder_name(name), title=f"{recipe.model}, {recipe.task}: plain, each technique alone, combined",
                  base=base, rungs=tuple(rungs), notes=tuple(notes))


def _alone(setting: Technique, recipe: Recipe) -> dict[str, Any]:
    """The changes that make the technique alone, where the recipe leaves them open."""
    alone = setting_alone(setting)
    if setting.slot == "precision" and Recipe.from_dict(alone).weight_rounding is not None:
        alone["optimizer"] = "adamw"  # its plain implementation rounds no weights
    return {field: value for field, value in alone.items() if getattr(recipe, field) == "auto"}
