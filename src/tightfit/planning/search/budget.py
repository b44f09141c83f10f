"""The budget of a search: how many traces it may still make."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.planning.search.space import trace_cost
from tightfit.recipe import Recipe

ANSWER_TRACES = 16
"""Traces that are made for what is asked beside the choice, at most."""


class TraceBudgetExceeded(Exception):
    """No more may be traced."""


@dataclass(kw_only=True)
class TraceBudget:
    """limit: traces at most, one of a compiled step counted as several. spent: of `limit`. made: traces counted as one
    each."""

    limit: int
    spent: int = 0
    made: int = 0

    def check(self) -> None:
        """Raise TraceBudgetExceeded where nothing is left."""
        if self.spent >= self.limit:
            raise TraceBudgetExceeded

    def take(self, recipe: Recipe) -> None:
        """Count the trace of a resolved recipe."""
        self.made += 1
        self.spent += trace_cost(recipe)

    def extend(self) -> None:
        """Allow for the answers beside the choice."""
        self.limit = self.spent + ANSWER_TRACES
