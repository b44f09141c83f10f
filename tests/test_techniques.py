"""What every technique's declaration must hold, so that recipe, docs and planner can rely on it."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from refusals import knobs
from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.techniques import VARIANTS, Technique
from tightfit.techniques.technique import Exactness

EVERY = [variant for variants in VARIANTS.values() for variant in variants]
RUNGS = [rung for variant in EVERY for rung in variant.representative_settings()]
DEVICES = [
    Device(kind="cpu", name="a processor", memory_bytes=0),
    Device(kind="cuda", name="an older GPU", memory_bytes=0, capability=(7, 5)),
    Device(kind="cuda", name="a newer GPU", memory_bytes=0, capability=(9, 0)),
]

each_variant = pytest.mark.parametrize("variant", EVERY, ids=lambda v: f"{v.slot}-{v.name}")
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=repr)


@each_variant
def test_is_documented(variant: type[Technique]) -> None:
    own = vars(variant)["__doc__"]
    assert own, "no docstring"
    assert not own.startswith(f"{variant.__name__}("), "the docstring is the one dataclasses make up"
    assert variant.speed, "no word on speed"
    assert variant.memory, "no word on memory"
    undocumented = [name for name, field in knobs(variant).items() if not field.description]
    assert not undocumented


@each_variant
def test_has_few_knobs_with_defaults(variant: type[Technique]) -> None:
    assert len(knobs(variant)) <= 5
    variant()


@each_variant
def test_is_a_frozen_dataclass_that_takes_no_unknown_knob(variant: type[Technique]) -> None:
    technique = variant()
    assert dataclasses.is_dataclass(variant)
    for field in (*knobs(variant), "unknown"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(technique, field, None)
    with pytest.raises(ValueError, match="unknown"):
        variant(unknown=1)


@each_variant
def test_says_how_exact_it_is(variant: type[Technique]) -> None:
    assert variant.exact in get_args(Exactness)
    assert variant.exact != "changes" or variant.tolerance > 0, "what changes the numbers says by how much"


@pytest.mark.parametrize("slot", VARIANTS)
def test_names_are_unique_in_their_slot(slot: str) -> None:
    names = [variant.name for variant in VARIANTS[slot]]
    assert len(names) == len(set(names))
    assert "auto" not in names
    assert all(variant.slot == slot for variant in VARIANTS[slot])
    assert slot in Recipe.model_fields


@each_rung
def test_rung_survives_yaml(rung: Technique) -> None:
    recipe = Recipe.from_dict({rung.slot: rung})
    assert getattr(Recipe.from_dict(recipe.to_dict()), rung.slot) == rung


@each_variant
def test_rungs_differ(variant: type[Technique]) -> None:
    rungs = variant.representative_settings()
    assert rungs
    assert all(type(rung) is variant for rung in rungs)
    assert len(set(map(repr, rungs))) == len(rungs)


@each_rung
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_refusals_say_what_to_write_or_install(rung: Technique, device: Device) -> None:
    recipe = Recipe.from_dict({"precision": "fp32", rung.slot: rung})
    for reason in rung.refuse(recipe, device):
        assert "; write " in reason or "or write " in reason or "run: pip install " in reason, reason


@each_variant
def test_facts_that_the_search_reads(variant: type[Technique]) -> None:
    """Offered settings are the variant's own, and its rules of thumb are shares."""
    for backend in ("pytorch", "jax"):
        recipe = Recipe.from_dict({"backend": backend})
        for device in DEVICES:
            offered = variant.search_settings(recipe, device)
            assert all(type(setting) is variant for setting in offered)
            assert len(set(map(repr, offered))) == len(offered)
            assert isinstance(variant.default_setting(recipe, device), variant | None)
            assert -1 < variant().slowdown(device) < 1
            others = {v.name for v in VARIANTS[variant.slot]} - {variant.name}
            assert variant.dominated_by.get(device.kind, "") in {"", *others}
            assert -16 <= variant().bytes_per_parameter(resolve(recipe, device)) <= 16
    assert 0 < variant.activation_share <= 1
    assert variant.numerics_change in range(5)
    assert variant.exact == "changes" or variant.numerics_change == 0
    assert variant.trace_cost >= 1


@pytest.mark.parametrize("slot", VARIANTS)
def test_no_slot_calls_two_settings_usual(slot: str) -> None:
    for device in DEVICES:
        named = [variant.default_setting(Recipe(), device) for variant in VARIANTS[slot]]
        assert sum(setting is not None for setting in named) <= 1
