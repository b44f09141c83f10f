"""Recipes evaluated beside a search, for one question that a person asks of its plan."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tightfit.devices import Device
from tightfit.planning.largest import largest_that_fits
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import MICRO, Exploration
from tightfit.recipe import Recipe


class Question:
    """Recipes traced for one answer beside the choice, at most `traces` of the search's budget."""

    def __init__(self, exploration: Exploration, traces: int) -> None:
        self.exploration, self.left = exploration, traces

    def cost(self, recipe: Recipe, text: str, device: Device | None = None) -> Evaluated | None:
        """Cost of a resolved recipe; None where it cannot be built. Raises TraceBudgetExceeded."""
        search = self.exploration
        there = device or search.device
        known = [*((search.device, found) for found in search.found.values()), *search.beside]
        for where, found in known:
            if where == there and found.recipe == recipe:
                return found
        if self.left <= 0:
            raise TraceBudgetExceeded
        search.count(recipe, text)
        self.left -= 1
        outcome = search.evaluator([(recipe, there)])[0]
        if not isinstance(outcome, Evaluated):
            return None
        search.beside.append((there, outcome))
        return outcome

    def largest(self, recipe: Recipe, sizes: Sequence[int], fields: Sequence[str] = (MICRO,)) -> Evaluated | None:
        """Cost of a resolved recipe with the largest of some sizes that fits with the margin; None where none does."""
        found: dict[int, Evaluated] = {}

        def needs(size: int) -> float:
            cost = self.cost(recipe.model_copy(update=dict.fromkeys(fields, size)), f"{fields[0]}={size}")
            if cost is None:
                return float("inf")
            found[size] = cost
            return cost.estimate.memory.demand

        with contextlib.suppress(TraceBudgetExceeded):
            largest_that_fits(sizes, needs, self.exploration.device.memory_bytes)
        return found[max(safe)] if (safe := [size for size, cost in found.items() if cost.estimate.safe]) else None
