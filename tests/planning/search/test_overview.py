"""Every GPU for one model: what fits, what is tried next, what is refused, and that it is what a plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.display.plans import GIB, memory
from tests.display.plans import estimate as estimate_made
from tests.failing import failing
from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.errors import ModelError
from tightfit.planning.costs import FitRank
from tightfit.planning.estimate import estimate
from tightfit.planning.search.overview import WAYS, GpuEstimate, Overview, overview
from tightfit.planning.search.pool import Pool
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe

FIELDS = {"model": "gpt2", "model_overrides": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64},
          "vocab_size": 128, "seq_len": 32, "batch_size": 4}
CARDS = [find_device(name) for name in ("h100-sxm", "l4", "t4")]


@pytest.fixture(scope="module")
def tools():
    return standard_tools(load_backend("pytorch"))


class Alone(Pool):
    """A pool of this process alone."""

    def __init__(self, tools):
        super().__init__(tools, "pytorch")
        self.side_by_side = 1


@pytest.fixture(scope="module")
def found(tools) -> Overview:
    with Alone(tools) as pool:
        return overview(Recipe.from_dict(FIELDS), CARDS, pool)


def test_the_smallest_card_comes_first_with_every_way(found):
    assert [card.device.name for card in found.cards] == ["T4", "L4", "H100 SXM"]
    assert all(list(card.ways) == list(WAYS) for card in found.cards)
    assert found.fitting
    trained = {name: cost.recipe for name, cost in found.cards[1].ways.items()}
    assert not trained["all weights"].offloaded.uses_host
    assert trained["offload=host"].offloaded.uses_host
    assert [trained[name].base.name for name in ("LoRA", "QLoRA")] == ["bf16", "nf4"]
    assert found.cards[0].ways["LoRA"].recipe.base.name == "fp16"  # a card without bf16
    assert found.traces == 8  # each way's for two generations


def test_the_smallest_card_of_each_way():
    found = overview(Recipe.from_dict({**FIELDS, "micro_batch_size": 1}), CARDS, Made(held=1.0))
    assert found.smallest["QLoRA"] == find_device("t4")
    assert found.to_json()["smallest"]["QLoRA"] == "T4"
    none = overview(Recipe.from_dict({**FIELDS, "micro_batch_size": 2}), CARDS, Made(held=1.0))
    assert set(none.to_json()["smallest"].values()) == {None}


def test_what_a_card_refuses_is_said(tools):
    with Alone(tools) as pool:
        found = overview(Recipe.from_dict({**FIELDS, "precision": "bf16"}), CARDS, pool)
    assert "computes bf16 in emulation only" in found.cards[0].ways["LoRA"]
    assert "refused" in found.to_json()["gpus"][0]["ways"]["LoRA"]


def test_one_trace_gives_each_card_what_a_plan_of_its_own_does(tools, found):
    for card in found.cards[1:]:
        for cost in (card.ways["all weights"], card.ways["offload=host"]):
            own = estimate(tools.predict(cost.recipe, card.device), cost.recipe, card.device, tools)
            assert cost.memory.used == own.memory.used
            assert cost.time == own.time


class Made:
    """A pool whose estimates are made up: what holds more than one sample does not fit."""

    def __init__(self, held):
        self.held, self.asked = held, []

    def each(self, function, jobs, progress=None):
        self.asked += [(recipe.micro_batch_size, recipe.offloaded.uses_host) for recipe, _ in jobs]
        time = estimate_made().time
        return [[GpuEstimate(recipe=recipe, memory=memory(self.held),
                              time=time if recipe.micro_batch_size == 1 else None)
                 for _ in group] for recipe, group in jobs]


def test_a_smaller_micro_batch_is_tried_where_the_first_is_too_large():
    pool = Made(held=1.0)  # 3 GiB of weights and optimizer states
    [card] = overview(Recipe.from_dict(FIELDS), CARDS[1:2], pool).cards
    assert pool.asked == [(4, False), (4, True), (4, False), (4, False), (1, False), (1, False), (1, False)]
    assert [cost.time is not None for cost in card.ways.values()] == [True, False, True, True]


def test_where_weights_and_states_alone_are_too_large_nothing_smaller_is_tried():
    pool = Made(held=10.0)
    overview(Recipe.from_dict(FIELDS), CARDS[1:2], pool)
    assert pool.asked == [(4, False), (4, True), (4, False), (4, False)]


@pytest.mark.parametrize(("short", "compiled"), [(0.4, True), (0.6, False)])
def test_compiled_blocks_are_tried_where_no_more_lacks_than_copies_of_weights(short, compiled):
    class Short(Made):
        """1 GiB of weights; of all of them nothing fits that is not compiled."""

        def each(self, function, jobs, progress=None):
            made = super().each(function, jobs, progress)
            lacking = memory(capacity=round((12 - short) * GIB), margin=0, device_rank=FitRank.NONE)
            return [[each if each.recipe.compile.compiles or each.recipe.offloaded.uses_host
                     or each.recipe.trainable.freezes else replace(each, memory=lacking, time=None)
                     for each in estimates] for estimates in made]

    card = replace(CARDS[1], memory_bytes=round((14 - short) * GIB))
    [found] = overview(Recipe.from_dict(FIELDS), [card], Short(held=1.0)).cards
    weights = found.ways["all weights"]
    assert (weights.time is not None) is weights.recipe.compile.compiles is compiled
    [pinned] = overview(Recipe.from_dict({**FIELDS, "compile": "off"}), [card], Short(held=1.0)).cards
    assert pinned.ways["all weights"].time is None


def test_pins_are_kept_and_make_one_way(tools):
    with Alone(tools) as pool:
        made = overview(Recipe.from_dict({**FIELDS, "trainable": "lora", "micro_batch_size": 2}), CARDS[1:2], pool)
    [card] = made.cards
    assert list(card.ways) == ["as written"]
    assert (card.ways["as written"].recipe.micro_batch_size, made.traces) == (2, 1)


def test_a_model_that_cannot_be_traced_is_an_error(tools):
    tools = replace(tools, predict=failing(ModelError("model: no")))
    with Alone(tools) as pool, pytest.raises(ModelError, match="model: no"):
        overview(Recipe.from_dict(FIELDS), CARDS, pool)
