"""The larger batch that a technique allows."""

from __future__ import annotations

from tightfit.backends.base import Backend
from tightfit.ladder.rungs import GROWTH
from tightfit.planning.estimate import Margin, fit, steps_alone
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target
from tightfit.recipe import Recipe


def grown(recipe: Recipe, within: Recipe, target: Target, backend: Backend) -> Recipe:
    """The recipe at the largest batch, of those in GROWTH, that is predicted to need no more than another does.

    Memory grows with the batch, so the first that needs more ends the search. recipe, within: resolved. Raises as
    predicting does.
    """
    tools = standard_tools(backend.predict, target.ceilings)

    def needs(asked: Recipe) -> int:
        trace = steps_alone(backend.predict(asked, target.device))
        return fit(trace, target.device, tools, Margin()).memory.peak_reserved

    room, largest = needs(within), recipe
    for factor in GROWTH:
        batch = int(within.batch_size * factor)
        bigger = recipe.override(batch_size=batch, micro_batch_size=batch)
        if needs(bigger) > room:
            break
        largest = bigger
    return largest
