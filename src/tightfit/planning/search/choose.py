"""Choosing among what a search evaluated: the mildest numerics, then the fastest, then the plainest, then the least
memory, each within what predictions can tell apart."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair, worst_rank
from tightfit.planning.search.space import LAST_RESORT, Level
from tightfit.planning.timing.uncertainty import seconds_error


def choose(exploration: Exploration, with_margin: bool = False) -> Pair | None:
    """The choice among what was evaluated: of what leaves the margin free, else, unless `with_margin`, of what fits; of
    the mildest numerics that no harsher ones beat by more than the clock's error. None where nothing fits."""
    for margin in (True,) if with_margin else (True, False):
        levels: dict[Level, list[Pair]] = {}
        for pair, found in exploration.found.items():
            if found.fit_rank <= worst_rank(margin):
                levels.setdefault(exploration.space.level(pair[0]), []).append(pair)
        eligible = [level for level in sorted(levels) if level[0] < LAST_RESORT] or sorted(levels)
        eligible = eligible if eligible and admits_harsher(exploration, eligible[0]) else eligible[:1]
        fastest = [max(map(exploration.speed, levels[level])) for level in eligible]
        for level, speed in zip(eligible, fastest, strict=False):
            if speed * (1 + CLOCK_ERROR) >= max(fastest):
                return _plainest(exploration, levels[level])
    return None


def admits_harsher(exploration: Exploration, level: Level) -> bool:
    """Whether harsher numerics than the mildest that fit may be chosen for their speed: where the recipe allows it, or
    has to change them all the same."""
    return not exploration.keeps_numerics and (level > (0, 0) or exploration.space.recipe.allow_numerics)


def _plainest(exploration: Exploration, pairs: Sequence[Pair]) -> Pair:
    """The plainest of one level of what is as fast as the fastest, and of those that none can tell apart the one with
    the least memory, the host's included; what needs no retries first."""
    found, space, speed = exploration.found, exploration.space, exploration.speed
    rank = min(found[pair].fit_rank for pair in pairs)
    pairs = [pair for pair in pairs if found[pair].fit_rank == rank]
    enough = max(map(speed, pairs)) / (1 + CLOCK_ERROR)
    as_fast = [pair for pair in pairs if speed(pair) >= enough]
    least = min(space.non_defaults(choice) for choice, _ in as_fast)
    plain = [pair for pair in as_fast if space.non_defaults(pair[0]) == least]
    fastest = max(plain, key=speed)
    alike = [pair for pair in plain if pair == fastest or _equally_fast(exploration, pair, fastest)]
    memory = {pair: found[pair].estimate.memory for pair in alike}
    return min(alike, key=lambda pair: (memory[pair].used + memory[pair].host, -speed(pair)))


def _equally_fast(exploration: Exploration, one: Pair, other: Pair) -> bool:
    """Whether the error of their times' difference, in which errors of both cancel out, is above the difference."""
    a, b = exploration.found[one].estimate.time, exploration.found[other].estimate.time
    difference = {kind: seconds - b.work.get(kind, 0.0) for kind, seconds in a.work.items()}
    error = seconds_error(difference, exploration.device, a.calibrated)
    return abs(a.step_seconds - b.step_seconds) <= (error or 0.0)
