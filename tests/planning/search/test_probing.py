"""What a search learns of a combination with few traces, and what it says before any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.toy import Toy
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.defaults import settle_rest
from tightfit.planning.estimate import Margin
from tightfit.planning.search.budget import Budget, Spent
from tightfit.planning.search.candidates import Scope, configs
from tightfit.planning.search.probing import OPTIMISM, PROBES, Prober
from tightfit.recipe import Recipe
from tightfit.techniques.checkpointing import EveryBlock
from tightfit.techniques.optimizer import AdamW8bit, Lion

DEVICE = Device(kind="cuda", name="toy", memory_bytes=1 << 40, capability=(8, 0))


@pytest.fixture
def toy():
    return Toy.drawn(3)


def prober_of(toy, budget=None, tools=None, **pins):
    """A prober that knows nothing yet, and the plainest combination."""
    recipe = settle_rest(Recipe.from_dict({"batch_size": 16, "compile": "off", "precision": "bf16", **pins}), DEVICE)
    prober = Prober(recipe, DEVICE, tools or toy.tools(), Margin(), [1, 2, 4, 8, 16], budget or Budget())
    choices = configs(recipe, DEVICE, Scope(numerics=True))
    for config in choices:
        prober.plain.setdefault(config.family, config)
    return prober, choices[0]


def test_two_traces_tell_of_every_micro_batch(toy):
    prober, plain = prober_of(toy)
    assert prober.probe(plain)
    assert prober.probe(plain)
    assert [recipe.micro_batch_size for recipe in toy.calls] == list(PROBES)
    assert not prober.verified(plain, 4)
    made = prober.estimate(plain, 4)
    assert prober.verify(plain, 4).memory == made.memory
    assert prober.verified(plain, 4)


def test_one_trace_more_tells_of_a_kind_of_checkpointing_and_one_of_an_optimizer(toy):
    prober, plain = prober_of(toy)
    prober.probe(plain)
    every = plain.with_checkpointing(EveryBlock())
    prober.probe(every)
    assert len(toy.calls) == 3
    eight = next(c for c in configs(prober.recipe, DEVICE, Scope(numerics=True)) if isinstance(c.optimizer, AdamW8bit))
    prober.probe(eight)
    prober.probe(eight.with_checkpointing(EveryBlock()))
    assert len(toy.calls) == 4


def test_an_optimizer_is_traced_in_passes_that_want_no_compiler(toy):
    prober, plain = prober_of(toy, compile="per-block", checkpointing="memory-budget")
    assert prober.probe(plain)
    eight = next(c for c in configs(prober.recipe, DEVICE, Scope(numerics=True)) if isinstance(c.optimizer, AdamW8bit))
    assert prober.probe(eight), prober.refused
    assert (eight.checkpointing.name, eight.compile.name) == ("memory-budget", "per-block")


def test_what_lies_in_memory_is_a_rule_of_thumb_until_the_optimizer_was_traced(toy):
    prober, plain = prober_of(toy, precision="bf16-pure")
    weights = toy.blocks * toy.weights
    assert prober.resident(plain) == 0
    prober.probe(plain)
    assert plain.precision.weight_rounding == "kahan"
    assert prober.resident(plain) == (2 + 2 + 4 + 2) * weights  # the last of them Kahan's compensation
    lion = replace(plain, optimizer=Lion())
    assert prober.resident(lion) == round(OPTIMISM * (2 + 2 + 2 + 2) * weights)


def test_a_refusal_is_kept_and_asked_for_once(toy):
    def refusing(recipe, device):
        toy.calls.append(recipe)
        raise Refused("no")

    prober, plain = prober_of(toy, tools=replace(toy.tools(), predict=refusing))
    assert not prober.probe(plain)
    assert not prober.probe(plain)
    assert prober.refused == {plain: "no"}
    assert len(toy.calls) == 1
    assert prober.sample() is None


def test_traces_of_a_changed_recipe_count_together_with_its_own(toy):
    told = []
    prober, plain = prober_of(toy, Budget(limit=3, progress=lambda *state: told.append(state)))
    prober.probe(plain)
    beside = prober.beside(prober.recipe.override(checkpointing="every-block"), [1, 2, 4], "whether it would do")
    config = plain.with_checkpointing(EveryBlock())
    beside.plain[config.family] = config
    with pytest.raises(Spent):
        beside.probe(config)
    assert prober.budget.made == 3
    assert [text for _, _, text in told][2:] == ["whether it would do"]
