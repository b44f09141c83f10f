"""Recipes evaluated in processes of their own: the same figures, and the same errors."""

from __future__ import annotations

import pytest

from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import find_device
from tightfit.errors import Refused
from tightfit.planning.defaults import resolve
from tightfit.planning.search import pool
from tightfit.planning.search.evaluate import InProcess
from tightfit.planning.search.pool import Pool
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe

GPU = find_device("rtx-4090")


@pytest.fixture
def recipes(tiny):
    recipe = resolve(Recipe.from_dict({**tiny, "batch_size": 8}), GPU)
    return [recipe.model_copy(update={"micro_batch_size": micro}) for micro in (1, 2, 4)]


def tools():
    return standard_tools(PytorchBackend())


@pytest.mark.cold
def test_other_processes_give_the_same_figures_and_errors(recipes, monkeypatch):
    monkeypatch.setattr(pool, "WORTHWHILE_SECONDS", 0.0)
    monkeypatch.setattr(pool, "cores", lambda: 2)
    alone = InProcess(tools())([(recipe, GPU) for recipe in recipes])
    with Pool(tools(), "pytorch") as evaluator:
        first = evaluator([(recipes[0], GPU)])
        (worker,) = evaluator._workers
        refused = recipes[0].model_copy(update={"checkpointing": Recipe(checkpointing="memory-budget").checkpointing})
        both = evaluator([(recipes[1], GPU), (recipes[2], GPU)])
        other = evaluator([(recipes[0], GPU), (refused, GPU)])[1]
        assert worker.alive()
        worker.end()
        after = evaluator([(recipes[1], GPU), (recipes[2], GPU)])
    assert [*first, *both] == alone
    assert isinstance(other, Refused)
    assert after == alone[1:]


def test_quick_recipes_start_no_process(recipes, monkeypatch):
    monkeypatch.setattr(pool, "WORTHWHILE_SECONDS", 1e9)
    monkeypatch.setattr(pool, "cores", lambda: 2)
    with Pool(tools(), "pytorch") as evaluator:
        assert evaluator([(recipes[0], GPU)])[0].fit_rank == 0
        assert evaluator._workers == []


def doubled(evaluator, number):
    assert isinstance(evaluator, InProcess)
    return 2 * number


@pytest.mark.cold
def test_whoever_is_free_takes_the_next_job(monkeypatch):
    monkeypatch.setattr(pool, "cores", lambda: 2)
    told = []
    with Pool(tools(), "pytorch") as evaluator:
        assert evaluator.each(doubled, [(1,), (2,), (3,)], told.append) == [2, 4, 6]
        (worker,) = evaluator._workers
        assert evaluator.each(doubled, [(n,) for n in range(9)]) == [2 * n for n in range(9)]
        assert worker.alive()
        worker.end()
        assert evaluator.each(doubled, [(1,), (2,)]) == [2, 4]
    assert told == [0, 1, 2]
