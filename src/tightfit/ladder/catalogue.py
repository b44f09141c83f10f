"""The ladders that have a name (ladders.yaml), and the guides' table of techniques (guides.yaml)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import TypeAdapter

from tightfit.errors import RecipeError, nearest
from tightfit.ladder.rungs import PLAIN, Ladder, setting_alone, setting_name
from tightfit.recipe import CHOICES
from tightfit.techniques import SLOTS

AUTO = dict.fromkeys(CHOICES, "auto")
"""The changes that leave every choice to the plan."""


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
    """Each ladder by its name."""
    return {name: TypeAdapter(Ladder).validate_python(_whole(name, values))
            for name, values in _read("ladders.yaml").items()}


def find_ladder(name: str) -> Ladder:
    """The ladder of that name. Raises RecipeError for an unknown one, listing them."""
    if name not in ladders():
        raise RecipeError(f"{name!r} is no ladder that has a name; {nearest(name, ladders())}")
    return ladders()[name]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath(name).read_text("utf-8"))
    return found


def _whole(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """A ladder's fields from its entry: the plain recipe below its base, and the rungs that `each` stands for."""
    rungs = [{key: value for key, value in rung.items() if key != "planned"}
             | ({"changes": AUTO | rung.get("changes", {})} if rung.get("planned") else {}) for rung in values["rungs"]]
    rungs += _each(**values["each"]) if "each" in values else []
    return {**values, "name": name, "base": PLAIN | values["base"], "rungs": rungs}


def _each(slot: str, against: str, feature: str) -> Iterator[dict[str, Any]]:
    """Every setting of a slot but its first variant, alone and at the larger batch that it allows."""
    for technique in SLOTS[slot][1:]:
        for setting in technique.rungs():
            rung = {"name": setting_name(setting), "changes": setting_alone(setting), "against": against}
            yield {**rung, "feature": feature}
            yield {**rung, "name": f"{rung['name']}, larger batch", "grows": True}
