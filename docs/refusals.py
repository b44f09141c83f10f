"""When each technique is refused, found by asking it: on which devices, beside which other choices, and why."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest import mock

from tightfit.devices import Device
from tightfit.recipe import Recipe
from tightfit.techniques import VARIANTS, Technique

DEVICES = {
    "CPU": Device(kind="cpu", name="this device", memory_bytes=0),
    "CUDA before 8.0": Device(kind="cuda", name="this device", memory_bytes=0, capability=(7, 5)),
    "CUDA 8.0 and later": Device(kind="cuda", name="this device", memory_bytes=0, capability=(9, 0)),
}
"""The kinds of device a technique can tell apart, by CUDA compute capability."""

Choice = tuple[str, str]
"""A dotted field and its value, as text."""

Circumstance = frozenset[Choice]
"""What a recipe names besides a technique with its defaults."""


@dataclass(frozen=True)
class Refusal:
    """A reason why a technique cannot serve: on which devices, and besides which other choices."""

    where: str
    when: str
    reason: str


def knobs(variant: type[Technique]) -> Mapping[str, Any]:
    """A technique's fields by name, as pydantic describes them."""
    fields: Mapping[str, Any] = vars(variant)["__pydantic_fields__"]
    return fields


def refusals(variant: type[Technique]) -> list[Refusal]:
    """Every reason `refuse` gives: for each knob's values, beside each setting of the other slots, on each device.

    The sentences come from `refuse` itself, asked once with every optional library and compiler in place, and once
    with none of them. Of the circumstances of one reason only the smallest are kept.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for provided in (True, False):
        with _libraries(provided):
            asked = _ask(variant)
        for (reason, place), whens in asked.items():
            if (reason, place) not in found:
                found[reason, place] = _when(variant, list(whens)) if provided else ["nothing optional installed"]
    merged: dict[tuple[str, str], list[str]] = {}
    for (reason, place), texts in found.items():
        merged.setdefault((reason, "; ".join(texts)), []).append(place)
    return [Refusal(where=_where(places), when=when, reason=reason) for (reason, when), places in merged.items()]


def _ask(variant: type[Technique]) -> dict[tuple[str, str], dict[Circumstance, None]]:
    """All circumstances of each reason on each device."""
    asked: dict[tuple[str, str], dict[Circumstance, None]] = {}
    for setting, chosen in _settings(variant):
        for recipe, others in _recipes(variant.slot, setting):
            for place, device in DEVICES.items():
                for reason in setting.refuse(recipe, device):
                    asked.setdefault((reason, place), {})[frozenset(chosen + others)] = None
    return asked


def _when(variant: type[Technique], whens: Sequence[Circumstance]) -> list[str]:
    """The smallest circumstances of a reason, as text; for one that needs none, the choices that lift it."""
    if frozenset() in whens:
        neighbours = [frozenset(others) for _, others in _recipes(variant.slot, variant()) if len(others) == 1]
        lifting = [_choices(other) for other in neighbours if other not in whens]
        return ["anything but " + ", ".join(lifting)] if lifting else []
    return [_choices(when) for when in whens if not any(known < when for known in whens)]


def _settings(variant: type[Technique]) -> Iterator[tuple[Technique, tuple[Choice, ...]]]:
    """The technique with its defaults, then with each other value of each knob whose values can be listed."""
    yield variant(), ()
    for name, field in knobs(variant).items():
        for value in _listed_values(field.annotation):
            if value != field.default:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                yield variant(**{name: value}), ((f"{variant.slot}.{name}", text),)


def _recipes(slot: str, setting: Technique) -> Iterator[tuple[Recipe, tuple[Choice, ...]]]:
    """A recipe with `setting` and nothing else named, then beside each setting of each other slot."""
    yield Recipe.from_dict({slot: setting}), ()
    for other, variants in VARIANTS.items():
        if other == slot:
            continue
        for variant in variants:
            for neighbour, chosen in _settings(variant):
                recipe = Recipe.from_dict({slot: setting, other: neighbour})
                yield recipe, ((other, variant.name), *chosen)


@contextmanager
def _libraries(provided: bool) -> Iterator[None]:
    """Every optional library and compiler found, or none, whatever this machine has: pages must not depend on it."""
    answer = "found" if provided else None
    with mock.patch.object(importlib.util, "find_spec", return_value=answer), \
         mock.patch.object(shutil, "which", return_value=answer):
        yield


def _listed_values(annotation: Any) -> Iterator[Any]:
    """The values of a type that has few of them; none for numbers and texts."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from get_args(annotation)
    elif annotation is bool:
        yield from (False, True)
    elif origin in (Union, UnionType):
        for branch in get_args(annotation):
            yield from _listed_values(branch)


def _where(places: Sequence[str]) -> str:
    if len(places) == len(DEVICES):
        return "any device"
    if all(place in places for place in DEVICES if place.startswith("CUDA")):
        return "CUDA"
    return ", ".join(places)


def _choices(when: Circumstance) -> str:
    return " ".join(f"`{field}={value}`" for field, value in sorted(when))
