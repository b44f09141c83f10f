"""The budget of a search: how many traces it may still make, and what they are counted for."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.planning.search.space import trace_cost
from tightfit.recipe import Recipe


class TraceBudgetExceeded(Exception):
    """No more may be traced."""


@dataclass(kw_only=True)
class TraceBudget:
    """limit: traces at most, one of a compiled step counted as several. kept_back: how many of them are left for what
    is asked beside the choice, until they are released. spent: of `limit`. made: traces counted as one each."""

    limit: int
    kept_back: int = 0
    spent: int = 0
    made: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left."""
        return self.spent >= self.limit - self.kept_back

    def check(self) -> None:
        """Raise TraceBudgetExceeded where nothing is left."""
        if self.exhausted:
            raise TraceBudgetExceeded

    def take(self, recipe: Recipe) -> None:
        """Count the trace of a resolved recipe."""
        self.made += 1
        self.spent += trace_cost(recipe)

    def release(self) -> None:
        """Give out what was kept back."""
        self.kept_back = 0
