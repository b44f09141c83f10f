"""How many traces a search may make."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tightfit.recipe import Recipe
from tightfit.trace import Trace

Progress = Callable[[int, int, str], None]
"""Told how many traces are done, how many there are at most, and what comes next."""

COMPILING = 7
"""How many times as long a compiled trace of as many ops and allocations takes."""


class Spent(Exception):
    """No more traces may be made."""


@dataclass(kw_only=True)
class Budget:
    """What traces may still be made. made: how many were.

    limit: how many at most; None for as many as are asked for. kept_back: how many of these are kept until `release`.
    events: ops and allocations that traces may still have, of a search that has something to go on already; compiled
    ones count COMPILING times. progress: told of each trace.
    """

    limit: int | None = None
    kept_back: int = 0
    events: float = math.inf
    progress: Progress | None = None
    made: int = 0

    @property
    def reached(self) -> bool:
        """Whether as many were made as may be, however large."""
        return self.limit is not None and self.made >= self.allowed

    @property
    def allowed(self) -> int:
        """How many may be made, less those kept back."""
        assert self.limit is not None
        return max(self.limit - self.kept_back, 1)

    def release(self) -> None:
        """Let what was kept back be spent, on traces of any size."""
        self.kept_back, self.events = 0, math.inf

    def spend(self, text: str, *, needed: bool = False) -> None:
        """Count a trace that is to be made. text: what is told of it. needed: whatever its size, for nothing is known
        yet. Raises Spent."""
        if self.reached or (self.events <= 0 and not needed):
            raise Spent
        if self.progress is not None and self.limit is not None:
            self.progress(self.made, self.limit, text)
        self.made += 1

    def charge(self, trace: Trace, recipe: Recipe) -> None:
        """Count what a trace holds."""
        self.events -= (len(trace.ops) + len(trace.allocations)) * (COMPILING if recipe.compiled else 1)

    def done(self) -> None:
        """Tell that nothing more is traced."""
        if self.progress is not None:
            self.progress(self.made, self.made, "done")
