"""A choice is evaluated with each of its values undone, where that may be as fast: of equals the plainest is chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.plain import PLAIN
from tests.planning.search.declared import GIB, Declared
from tightfit.devices import find_device
from tightfit.planning.estimate import Margin
from tightfit.planning.search.budget import TraceBudget
from tightfit.planning.search.choose import choose
from tightfit.planning.search.evaluate import InProcess
from tightfit.planning.search.exploration import Exploration
from tightfit.planning.search.explore import improve
from tightfit.planning.search.neighbors import compared, plainer, smaller
from tightfit.planning.search.search import search
from tightfit.planning.search.space import Space
from tightfit.recipe import Recipe
from tightfit.techniques.compile import PerBlock
from tightfit.techniques.offload import Host, NoOffload

FASTER = 3.0
"""A compiled step, against an eager one: more than any rule of thumb lets a search hope for."""


@pytest.mark.parametrize("parameters", [1e8, 1e9])
def test_what_waits_in_host_memory_is_tried_on_the_device_that_has_room_for_it(parameters):
    pinned = {**PLAIN, "batch_size": 64, "attention": "auto", "compile": "auto"}
    tools = Declared(parameters=parameters, sample=0.2 * GIB, speeds={("fp32", "adamw"): 1e4}, compiled=FASTER).tools()
    space = Space(Recipe.from_dict(pinned), find_device("t4"))
    exploration = Exploration(space, InProcess(tools), TraceBudget(limit=20), margin=Margin())

    def with_values(**values):
        choice = space.defaults
        for field, value in values.items():
            choice = space.with_value(choice, field, value)
        return choice

    eager, resident = with_values(compile=space.values["compile"][0]), with_values(compile=PerBlock())
    assert resident[space.fields.index("offload")] == NoOffload()
    states_alone = with_values(compile=PerBlock(), offload=Host(weights=0.0, gradients=0.0))
    exploration.evaluate([(eager, 4), (eager, 8), (states_alone, 8)])
    improve(exploration, [plainer])
    fits = 16 * parameters < 13 * GIB
    assert ((resident, 8) in exploration.found) is fits


def test_nothing_is_tried_where_nothing_is_undone():
    tools = Declared(parameters=1e8, sample=0.2 * GIB, speeds={("fp32", "adamw"): 1e4}).tools()
    space = Space(Recipe(batch_size=16), replace(find_device("t4"), memory_bytes=64 * GIB))
    exploration = Exploration(space, InProcess(tools), TraceBudget(limit=20), margin=Margin())
    exploration.evaluate([(space.defaults, 8)])
    improve(exploration, [plainer])
    assert list(exploration.found) == [(space.defaults, 8)]


class Cached(Declared):
    """The fastest micro-batch is one of 8: what larger ones work on no longer lies in the device's cache."""

    def seconds(self, trace, recipe, device):
        timed = super().seconds(trace, recipe, device)
        micro = recipe.micro_batch_size
        return replace(timed, seconds=timed.seconds * (1 + 0.13 * abs(math.log2(micro / 8))))


def test_where_larger_micro_batches_are_slower_smaller_ones_are_tried():
    pinned = {**PLAIN, "batch_size": 64, "offload": "none", "precision": "bf16"}
    toy = Cached(parameters=1e8, sample=0.01 * GIB, speeds={("bf16", "adamw"): 1e4})
    space = Space(Recipe.from_dict(pinned), find_device("l4"))
    exploration = Exploration(space, InProcess(toy.tools()), TraceBudget(limit=20), margin=Margin())
    only = space.defaults
    exploration.evaluate([(only, 16)])
    exploration.evaluate(compared(exploration, (only, 16)))
    improve(exploration, [smaller])
    assert [micro for _, micro in exploration.found] == [16, 32, 8, 4]
    assert choose(exploration) == (only, 8)


def test_what_proves_better_is_asked_for_its_own_neighbors():
    pinned = {**PLAIN, "batch_size": 64, "offload": "none", "precision": "bf16"}
    toy = Cached(parameters=1e8, sample=0.01 * GIB, speeds={("bf16", "adamw"): 1e4})
    space = Space(Recipe.from_dict(pinned), find_device("l4"))
    exploration = Exploration(space, InProcess(toy.tools()), TraceBudget(limit=20), margin=Margin())
    exploration.evaluate([(space.defaults, 2)])
    improve(exploration, [lambda _, best: [(best[0], 2 * best[1])]])
    assert [micro for _, micro in exploration.found] == [2, 4, 8, 16]
    assert choose(exploration) == (space.defaults, 8)


@pytest.mark.parametrize("comparing", [False, True])
def test_micro_batches_are_tried_that_are_smaller_than_any_known(comparing):
    """Of 4 and more none is in the cache, and all are as fast."""
    class Small(Declared):
        def seconds(self, trace, recipe, device):
            timed = super().seconds(trace, recipe, device)
            return replace(timed, seconds=timed.seconds * (0.8 if recipe.micro_batch_size == 2 else 1.0))

    pinned = {**PLAIN, "batch_size": 64, "offload": "none", "precision": "bf16"}
    toy = Small(parameters=1e8, sample=0.01 * GIB, speeds={("bf16", "adamw"): 1e4})
    plan = search(Recipe.from_dict(pinned), find_device("l4"), toy.tools(), comparing=comparing)
    assert plan.recipe.micro_batch_size == 2


def test_where_the_fastest_micro_batch_is_a_small_one_compiling_is_tried_there():
    pinned = {**PLAIN, "batch_size": 64, "offload": "none", "precision": "bf16", "compile": "auto"}
    toy = Cached(parameters=1e8, sample=0.01 * GIB, speeds={("bf16", "adamw"): 1e4}, compiled=1.4)
    plan = search(Recipe.from_dict(pinned), find_device("l4"), toy.tools())
    assert plan.chosen is not None
    assert plan.chosen.recipe.compile.compiles
    assert plan.chosen.recipe.micro_batch_size == 8
