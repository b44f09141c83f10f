"""Which combinations a search weighs, and which pins contradict each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.search.declared import GIB, Declared, replay
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.estimate import capacity as room
from tightfit.planning.search.evaluate import InProcess
from tightfit.planning.search.space import Space, sizes_to_try
from tightfit.planning.search.wording import choices_text
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import field_text
from tightfit.techniques.checkpointing import EveryNth

AMPERE = Device(kind="cuda", name="A100", memory_bytes=1, capability=(8, 0))
VOLTA = Device(kind="cuda", name="V100", memory_bytes=1, capability=(7, 0))
CPU = Device(kind="cpu", name="CPU", memory_bytes=1)


def names(recipe, device, slot, level=None):
    space = Space(recipe, device)
    return {getattr(space.recipe_for(c, 1), slot).name for c in space.combinations if level in (None, space.level(c))}


@pytest.mark.parametrize(("batch", "expected"), [
    (1, [1]), (2, [1, 2]), (64, [1, 2, 4, 8, 16, 32, 64]), (48, [1, 2, 4, 8, 16, 24, 48]),
    (61, [1, 2, 4, 8, 16, 32, 61]), (100, [1, 2, 4, 5, 10, 25, 50, 100]),
])
def test_micro_batches_divide_the_batch_where_they_can(batch, expected):
    assert sizes_to_try(batch) == expected


def test_a_pinned_micro_batch_stays_and_generating_has_one():
    assert Space(Recipe(batch_size=64, micro_batch_size=12), AMPERE).sizes == [12]
    assert Space(Recipe(batch_size=64, mode="inference"), AMPERE).sizes == [64]


def test_the_mildest_level_changes_no_numerics():
    for device, precision in ((AMPERE, {"bf16", "fp32"}), (VOLTA, {"fp16", "fp32"}), (CPU, {"fp32", "bf16"})):
        assert names(Recipe(), device, "precision", (0, 0)) == precision
        assert names(Recipe(), device, "optimizer", (0, 0)) == {"adamw"}
        space = Space(Recipe(), device)
        assert all(space.numerics(space.recipe_for(c, 1)) == () for c in space.combinations if space.level(c) == (0, 0))


def test_levels_go_from_mild_to_harsh():
    """8-bit and bf16 states, then 16-bit weights, then 4-bit states, then another learning rate."""
    space, by_level = Space(Recipe(), AMPERE), {}
    for choice in space.combinations:
        recipe = space.recipe_for(choice, 1)
        by_level.setdefault(space.level(choice), set()).add((recipe.precision.name, recipe.optimizer.name))
    assert sorted(by_level) == [(0, 0), (1, 1), (2, 2), (2, 3), (3, 3), (3, 5), (4, 4)]
    assert {optimizer for _, optimizer in by_level[1, 1]} == {"adamw-8bit", "adamw-anyprecision"}
    assert by_level[2, 2] == {("bf16-pure", "adamw")}
    assert by_level[2, 3] == {("bf16-pure", "adamw-8bit")}
    assert {optimizer for _, optimizer in by_level[3, 3]} == {"adamw-4bit"}
    assert not {optimizer for pairs in by_level.values() for _, optimizer in pairs} & {"lion", "muon", "sgd"}


def test_every_kind_of_checkpointing_is_weighed():
    space = Space(Recipe(), AMPERE)
    assert len({repr(space.recipe_for(c, 1).checkpointing) for c in space.combinations}) == 11
    budgets = [c for c in space.combinations if space.recipe_for(c, 1).checkpointing.name == "memory-budget"]
    assert {space.recipe_for(c, 1).compile.name for c in budgets} == {"per-block"}


def test_the_usual_combination_comes_first():
    for device, precision in ((AMPERE, "bf16"), (VOLTA, "fp16"), (CPU, "fp32")):
        space = Space(Recipe(), device)
        first = space.recipe_for(space.combinations[0], 1)
        assert space.combinations[0] == space.defaults
        assert (first.precision.name, first.attention.name, first.compile.name) == (precision, "sdpa", "off")
        complexity = [space.complexity(choice) for choice in space.combinations]
        assert complexity == sorted(complexity)


def test_nothing_refused_is_weighed_and_pins_stay():
    recipe = Recipe(optimizer="lion", precision="bf16-pure", checkpointing="mlp")
    space = Space(recipe, AMPERE)
    for choice in space.combinations:
        resolved = space.recipe_for(choice, 2)
        assert resolved.refusals(AMPERE) == []
        assert (resolved.optimizer, resolved.precision, resolved.checkpointing) == (
            recipe.optimizer, recipe.precision, recipe.checkpointing)
        assert space.level(choice) == (0, 0)


def test_generating_weighs_formats_and_kernels_alone():
    space = Space(Recipe(mode="inference"), AMPERE)
    assert set(space.fields) == {"precision", "attention"}
    assert len(space.combinations) == 6
    assert space.recipe_for(space.defaults, 1).precision.full_eval


def test_the_allocators_setting_stays_open_on_gpus_where_it_is_not_pinned():
    cases = ((Recipe(), AMPERE, "auto"), (Recipe(), CPU, False), (Recipe(expandable_segments=True), AMPERE, True),
             (Recipe(backend="jax"), AMPERE, False))
    for recipe, device, setting in cases:
        space = Space(recipe, device)
        assert space.recipe_for(space.defaults, 1).expandable_segments == setting


def test_fields_are_written_as_a_person_writes_them():
    assert field_text("checkpointing", EveryNth(n=3)) == "checkpointing=every-nth checkpointing.n=3"
    assert field_text("expandable_segments", True) == "expandable_segments=true"


@pytest.mark.parametrize("expandable", [True, False])
def test_of_two_settings_that_are_as_tight_the_one_that_reserves_less_is_taken(expandable):
    device = replace(AMPERE, memory_bytes=GIB)

    def replayed(trace, capacity, settings):
        found, tight = replay(trace, capacity, settings), capacity < room(trace, device)
        found.fits = "no" if tight else "yes"
        found.peak_reserved += settings.expandable_segments is not expandable
        return found

    tools = replace(Declared(parameters=1e3, sample=1.0, speeds={("bf16", "adamw"): 1e4}).tools(), replay=replayed)
    space = Space(Recipe(), device)
    cost = InProcess(tools).one(space.recipe_for(space.defaults, 1), device)
    assert (cost.fit_rank, cost.recipe.expandable_segments) == (FitRank.TIGHT, expandable)
    one = Space(Recipe(), AMPERE).recipe_for(Space(Recipe(), AMPERE).defaults, 4)
    assert choices_text(one.model_copy(update={"micro_batch_size": 8}), one) == "micro_batch_size=8"
    assert choices_text(one, one) == "the same"
    assert choices_text(one, None, ("micro_batch_size", "compile")) == "micro_batch_size=4 compile=off"


@pytest.mark.parametrize(("pins", "device", "words"), [
    ({"checkpointing": "memory-budget", "compile": "off"}, AMPERE, ["checkpointing: ", "write compile=per-block"]),
    ({"precision": "bf16"}, VOLTA, ["precision: ", "write precision=fp16"]),
    ({"precision": "fp32", "attention": {"name": "sdpa", "kernel": "flash"}}, AMPERE,
     ["attention: ", "needs half precision"]),
])
def test_contradictory_pins_are_named(pins, device, words):
    with pytest.raises(Refused) as caught:
        _ = Space(Recipe.from_dict(pins), device).combinations
    assert ";" not in str(caught.value).partition("; write")[0]  # what stands against every combination, nothing else
    for word in words:
        assert word in str(caught.value)
