"""Neighbors of a choice: pairs that differ from it in a setting or in the micro-batch, and may be better or are shown
beside it. Which of them were evaluated is the caller's to know."""

from __future__ import annotations

from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.space import Combination


def plainer(exploration: Exploration, best: Pair) -> list[Pair]:
    """The choice with each of its non-default values undone, where that may be as fast."""
    (choice, micro), space, rank = best, exploration.space, exploration.found[best].fit_rank
    pairs = []
    for other in filter(space.allows, space.undone(choice)):
        forecast = exploration.forecasts.of(other).optimistic
        seconds = forecast.step_seconds(micro, space.samples_per_device)
        speed = exploration.speed_at(seconds, space.recipe_for(other, micro))
        resident = other == space.without_offload(choice)  # which copies less
        as_fast = resident or speed * (1 + CLOCK_ERROR) >= exploration.speed(best)
        if as_fast and exploration.fitting(forecast, [micro], rank):
            pairs.append((other, micro))
    return pairs


def smallest(exploration: Exploration, best: Pair) -> list[Pair]:
    """The choice at the smallest micro-batch, whose tensors the device's cache may hold. Not of what is compiled, which
    passes fewer tensors on, nor of sweeps."""
    space = exploration.space
    slow = space.trace_cost(best[0]) > 1 or space.needs_by_block(best[0])
    return [] if slow else [(best[0], exploration.sizes[0])]


def smaller(exploration: Exploration, best: Pair) -> list[Pair]:
    """The choice at the next smaller micro-batch than those that are known to be as fast, where the last was faster and
    no larger one is: of these more lies in the device's cache. What is slow to trace, only where a larger one was
    slower."""
    choice, micro = best
    speeds = {size: exploration.speed((other, size)) for other, size in exploration.found if other == choice}
    nearly, more = speeds[micro] / (1 + CLOCK_ERROR), speeds[micro] * (1 + CLOCK_ERROR)
    larger = [speed for size, speed in speeds.items() if size > micro]
    slower = min(larger, default=more) < nearly
    if max(larger, default=0.0) > more or not (slower or exploration.space.trace_cost(choice) == 1):
        return []
    least = min(size for size, speed in speeds.items() if speed >= nearly)
    below = [size for size in exploration.sizes if size < least]
    return [(choice, below[-1])] if below else []


def compared(exploration: Exploration, best: Pair) -> list[Pair]:
    """Comparisons that a plan shows: the choice at the next larger micro-batch, and with two of its non-default values
    undone."""
    (choice, micro), space = best, exploration.space
    larger = [(choice, other) for other in exploration.sizes if other > micro][:1]
    undone = [other for other in space.undone(choice) if space.allows(other) and space.trace_cost(other) == 1]
    return larger + [(other, micro) for other in undone[:2]]


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
