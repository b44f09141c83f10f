"""Which combinations a search weighs, and which pins contradict each other."""

from __future__ import annotations

import pytest

from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.search.candidates import (
    Scope,
    attentions,
    check_pins,
    configs,
    departures_of,
    micro_batch_sizes,
    numerics,
)
from tightfit.recipe import Recipe

AMPERE = Device(kind="cuda", name="A100", memory_bytes=1, capability=(8, 0))
VOLTA = Device(kind="cuda", name="V100", memory_bytes=1, capability=(7, 0))
CPU = Device(kind="cpu", name="CPU", memory_bytes=1)
ALL = Scope(full_precision=True, numerics=True, learning_rate=True)


def names(recipe, device, scope, slot):
    return {getattr(config, slot).name for config in configs(recipe, device, scope)}


@pytest.mark.parametrize(("batch", "expected"), [
    (1, [1]), (2, [1, 2]), (64, [1, 2, 4, 8, 16, 32, 64]), (48, [1, 2, 4, 8, 16, 24, 48]),
    (61, [1, 2, 4, 8, 16, 32, 61]), (100, [1, 2, 4, 5, 10, 25, 50, 100]),
])
def test_micro_batches_divide_the_batch_where_they_can(batch, expected):
    assert micro_batch_sizes(Recipe(batch_size=batch)) == expected


def test_pinned_micro_batch_stays():
    assert micro_batch_sizes(Recipe(batch_size=64, micro_batch_size=12)) == [12]


def test_plain_scope_changes_no_numerics():
    for device, precision in ((AMPERE, {"bf16"}), (VOLTA, {"fp16"}), (CPU, {"fp32", "bf16"})):
        found = configs(Recipe(), device, Scope())
        assert {c.precision.name for c in found} == precision
        assert {c.optimizer.name for c in found} == {"adamw"}
        assert {c.attention.name for c in found} == {"sdpa"}
        assert all(numerics(Recipe(), c) == () for c in found)


def test_wider_scopes_add():
    assert names(Recipe(), AMPERE, Scope(full_precision=True), "precision") == {"bf16", "fp32"}
    assert all(c.precision.tf32 for c in configs(Recipe(), AMPERE, ALL) if c.precision.name == "fp32")
    assert names(Recipe(), AMPERE, Scope(numerics=True), "optimizer") == {
        "adamw", "adamw-8bit", "adamw-4bit", "adamw-anyprecision"}
    assert "adafactor" in names(Recipe(), AMPERE, ALL, "optimizer")
    assert not names(Recipe(), AMPERE, ALL, "optimizer") & {"lion", "sgd"}


def test_every_kind_of_checkpointing_is_weighed():
    kinds = {repr(c.checkpointing) for c in configs(Recipe(), AMPERE, Scope())}
    assert len(kinds) == 11
    budgets = [c for c in configs(Recipe(), AMPERE, Scope()) if c.checkpointing.name == "memory-budget"]
    assert budgets
    assert {c.compile.name for c in budgets} == {"per-block"}


def test_nothing_refused_is_weighed_and_pins_stay():
    recipe = Recipe(optimizer="lion", precision="bf16-pure", checkpointing="mlp")
    found = configs(recipe, AMPERE, ALL)
    assert found
    for config in found:
        resolved = config.on(recipe, 2)
        assert resolved.refusals(AMPERE) == []
        assert (resolved.optimizer, resolved.precision, resolved.checkpointing) == (
            recipe.optimizer, recipe.precision, recipe.checkpointing)
        assert numerics(recipe, config) == ()
        assert departures_of(recipe, AMPERE, config)[0] == 0


def test_what_changes_numerics_is_told():
    config = next(c for c in configs(Recipe(), AMPERE, ALL)
                  if c.optimizer.name == "adamw-8bit" and c.precision.name == "bf16-pure")
    assert numerics(Recipe(), config) == ("optimizer=adamw-8bit", "precision=bf16-pure")


def test_other_kernels_are_fallbacks():
    assert [a.name for a in attentions(Recipe(), AMPERE)] == ["sdpa", "flex", "eager"]
    assert [a.name for a in attentions(Recipe(), CPU)] == ["sdpa", "eager"]
    assert [a.name for a in attentions(Recipe(attention="eager"), CPU)] == ["eager"]


@pytest.mark.parametrize(("pins", "device", "words"), [
    ({"checkpointing": "memory-budget", "compile": "off"}, AMPERE,
     ["checkpointing=memory-budget and compile=off cannot stand together", "write compile=per-block"]),
    ({"precision": "bf16"}, VOLTA, ["precision=bf16 cannot serve on V100", "write precision=fp16"]),
    ({"precision": "fp32", "attention": {"name": "sdpa", "kernel": "flash"}}, AMPERE,
     ["precision=fp32 and attention=sdpa", "needs half precision"]),
])
def test_contradictory_pins_are_named(pins, device, words):
    with pytest.raises(Refused) as caught:
        check_pins(Recipe.from_dict(pins), device)
    for word in words:
        assert word in str(caught.value)


def test_pins_that_leave_a_way_are_left_alone():
    check_pins(Recipe(checkpointing="memory-budget"), AMPERE)
    check_pins(Recipe(), VOLTA)
