"""Combinations that a plan shows beside its choice, evaluated once that stands."""

from __future__ import annotations

from contextlib import suppress

from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.choose import choose
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.host_memory import evaluate_shares
from tightfit.planning.search.space import Combination


def evaluate_comparisons(exploration: Exploration) -> None:
    """Evaluate the choice at the next larger micro-batch, with each of its other non-default values undone, and its
    like in the usual precision. One of them may prove to be the better choice, which may leave other room."""
    best, space = choose(exploration), exploration.space
    if best is None:
        return
    choice, micro = best
    larger = [(choice, other) for other in exploration.sizes if other > micro][:1]
    plainer = [other for other in space.undone(choice) if space.allows(other) and space.trace_cost(other) == 1]
    exploration.compared = larger + [(other, micro) for other in plainer[:2]]
    with suppress(TraceBudgetExceeded):
        exploration.evaluate([*exploration.compared, *usual_at_least_memory(exploration, best)])
        _evaluate_smaller(exploration)
        evaluate_shares(exploration)


def _evaluate_smaller(exploration: Exploration) -> None:
    """Evaluate the choice at smaller micro-batches than those that are known to be as fast, as long as each is faster,
    where no larger one was: of these more lies in the device's cache. What is slow to trace, only where a larger one
    was slower. Raises TraceBudgetExceeded."""
    best = choose(exploration)
    assert best is not None
    choice, micro = best
    speeds = {size: exploration.speed((other, size)) for other, size in exploration.found if other == choice}
    nearly, more = speeds[micro] / (1 + CLOCK_ERROR), speeds[micro] * (1 + CLOCK_ERROR)
    larger = [speed for size, speed in speeds.items() if size > micro]
    slower = min(larger, default=more) < nearly
    if max(larger, default=0.0) > more or not (slower or exploration.space.trace_cost(choice) == 1):
        return
    least = min(size for size, speed in speeds.items() if speed >= nearly)
    speed = speeds[least]
    for smaller in reversed([size for size in exploration.sizes if size < least]):
        exploration.evaluate([(choice, smaller)])
        pair = (choice, smaller)
        if pair not in exploration.found or exploration.speed(pair) <= speed:
            return
        speed = exploration.speed(pair)


def usual_at_least_memory(exploration: Exploration, best: Pair) -> list[Pair]:
    """The recipe of least memory in the usual precision, such as bf16, where a choice of the same numerics has another
    precision; else none."""
    usual = usual_precision(exploration, best)
    return [(exploration.space.least_memory(usual), exploration.sizes[0])] if usual else []


def usual_precision(exploration: Exploration, best: Pair) -> list[Combination]:
    """Combinations of the usual precision, where a choice keeps numerics and has another; else none."""
    space = exploration.space
    if "precision" not in space.fields or exploration.device.kind == "cpu" or space.level(best[0]) != (0, 0):
        return []
    usual = space.value(space.defaults, "precision")
    alike = [choice for choice in space.combinations
             if space.value(choice, "precision") == usual and space.level(choice) == (0, 0)]
    return [] if space.value(best[0], "precision") == usual else alike
