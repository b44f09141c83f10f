"""How many traces a search may make, and when it must stop."""

from __future__ import annotations

import pytest

from tightfit.planning.search.budget import COMPILING, Budget, Spent
from tightfit.recipe import Recipe
from tightfit.trace import Op, OpClass, Phase, Trace

LARGE = Trace(origin="predicted", ops=[Op("aten.mm", tick, Phase.FORWARD, OpClass.CONTRACTION) for tick in range(10)])


def test_what_is_kept_back_is_spent_after_its_release() -> None:
    told: list[tuple[int, int, str]] = []
    budget = Budget(limit=3, kept_back=1, progress=lambda *state: told.append(state))
    budget.spend("one")
    budget.spend("two")
    assert budget.reached
    with pytest.raises(Spent):
        budget.spend("three")
    budget.release()
    budget.spend("three")
    budget.done()
    assert told == [(0, 3, "one"), (1, 3, "two"), (2, 3, "three"), (3, 3, "done")]


def test_there_is_always_one() -> None:
    budget = Budget(limit=2, kept_back=6)
    budget.spend("one")
    assert budget.reached


def test_large_traces_use_it_up_until_the_release() -> None:
    budget = Budget(limit=9, events=10)
    budget.spend("one")
    budget.charge(LARGE, Recipe(compile="off"))
    with pytest.raises(Spent):
        budget.spend("two")
    budget.spend("two", needed=True)
    budget.release()
    budget.spend("three")
    assert not budget.reached


def test_compiled_traces_count_for_more() -> None:
    budget = Budget(limit=9, events=10 * COMPILING + 1)
    budget.charge(LARGE, Recipe(compile="per-block"))
    assert budget.events == 1


def test_without_a_limit_it_lasts() -> None:
    budget = Budget()
    for _ in range(100):
        budget.spend("another")
    assert not budget.reached
    assert budget.made == 100
