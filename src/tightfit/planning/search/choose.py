"""Choosing among what a search evaluated: the mildest numerics, then the fastest, then the plainest, then the least
memory, each within what predictions can tell apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tightfit.planning.costs import FitRank
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.space import Level
from tightfit.planning.timing.uncertainty import seconds_error


def choose(exploration: Exploration, worst: FitRank = FitRank.TIGHT) -> Pair | None:
    """The choice among what was evaluated: of what leaves the margin free, else of what fits at all, where `worst`
    admits that; of the mildest numerics that no harsher ones beat by more than the clock's error. None where there is
    none."""
    for rank in (FitRank.SAFE, worst):
        levels: dict[Level, list[Pair]] = {}
        for pair, found in exploration.found.items():
            if found.fit_rank <= rank:
                levels.setdefault(exploration.space.level(pair[0]), []).append(pair)
        if levels:
            mildest = min(levels)
            fastest = {level: max(map(exploration.speed, levels[level]))
                       for level in eligible_levels(exploration, mildest) if level in levels}
            enough = max(fastest.values()) / (1 + CLOCK_ERROR)
            return _plainest(exploration, levels[next(level for level, speed in fastest.items() if speed >= enough)])
    return None


def eligible_levels(exploration: Exploration, mildest: Level) -> list[Level]:
    """The mildest level of numerics that fits, and those beyond that may be chosen for their speed: where the recipe
    allows it, or has to change numerics all the same."""
    space = exploration.space
    admits = not exploration.keeps_numerics and (mildest > (0, 0) or space.recipe.allow_numerics)
    return [mildest, *(space.harsher(mildest) if admits else [])]


def speed_to_beat(exploration: Exploration, best: Pair | None) -> Callable[[Level], float]:
    """Samples a second beyond which a combination of a level may be chosen in the best one's place: of milder numerics
    nearly as many, else more than the fastest as mild does by more than the clock's error."""
    if best is None:
        return lambda level: 0.0
    own, rank = exploration.space.level(best[0]), exploration.found[best].fit_rank
    as_mild = [pair for pair, found in exploration.found.items()
               if found.fit_rank <= rank and exploration.space.level(pair[0]) == own]
    nearly = exploration.speed(best) / (1 + CLOCK_ERROR)
    faster = max(map(exploration.speed, as_mild)) * (1 + CLOCK_ERROR)
    return lambda level: nearly if level < own else faster


def _plainest(exploration: Exploration, pairs: Sequence[Pair]) -> Pair:
    """The plainest of one level of what is as fast as the fastest, of what the allocator has to free no blocks for
    where there is such; and of those that none can tell apart the one with the least memory, the host's included."""
    found, space, speed = exploration.found, exploration.space, exploration.speed
    enough = max(map(speed, pairs)) / (1 + CLOCK_ERROR)
    as_fast = [pair for pair in pairs if speed(pair) >= enough]
    as_fast = [pair for pair in as_fast if not found[pair].estimate.memory.retries] or as_fast
    least = min(space.complexity(choice) for choice, _ in as_fast)
    plain = [pair for pair in as_fast if space.complexity(pair[0]) == least]
    fastest = max(plain, key=speed)
    alike = [pair for pair in plain if pair == fastest or _equally_fast(exploration, pair, fastest)]
    memory = {pair: found[pair].estimate.memory for pair in alike}
    return min(alike, key=lambda pair: (memory[pair].used + memory[pair].host, -speed(pair)))


def _equally_fast(exploration: Exploration, one: Pair, other: Pair) -> bool:
    """Whether the error of their times' difference, in which errors of both cancel out, is above the difference."""
    a, b = exploration.found[one].estimate.time, exploration.found[other].estimate.time
    difference = {kind: seconds - b.work.get(kind, 0.0) for kind, seconds in a.work.items()}
    error = seconds_error(difference, exploration.device, a.calibrated, a.slower_host - b.slower_host)
    return abs(a.step_seconds - b.step_seconds) <= (error or 0.0)
