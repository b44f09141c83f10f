"""Probes: which combinations of a space may still be the best one, and at which micro-batch each is evaluated next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tightfit.planning.costs import FitRank
from tightfit.planning.defaults import default_micro_batch
from tightfit.planning.search.choose import choose, speed_to_beat
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.forecast import FieldValue
from tightfit.planning.search.host_demand import HostDemand, host_holds, too_much_for_host
from tightfit.planning.search.space import Combination

NO_GAIN = 0.03
"""Share of a step's time for which no larger micro-batch is tried."""


class Probe(NamedTuple):
    """A combination that is worth evaluating.

    micro: where to evaluate it. speed: the most samples a second that it can reach. fits: whether it is expected to fit
    there. unknown: values of which only rules of thumb are known.
    """

    choice: Combination
    micro: int
    speed: float
    fits: bool
    unknown: tuple[FieldValue, ...]


def likeliest(exploration: Exploration, choices: Sequence[Combination], worst: FitRank) -> list[Pair]:
    """Pairs that may win, of some combinations, the likeliest first; of those that are evaluated side by side each
    teaches something of its own."""
    exploration.considered.update(choices)
    probes = sorted(probes_of(exploration, choices, worst),
                    key=lambda p: (p.fits, p.speed, -exploration.space.complexity(p.choice)), reverse=True)
    pairs: list[Pair] = []
    learned: set[FieldValue] = set()
    for probe in probes:
        if learned.isdisjoint(probe.unknown):
            pairs.append((probe.choice, probe.micro))
            learned.update(probe.unknown)
    return pairs


def probes_of(exploration: Exploration, choices: Sequence[Combination], worst: FitRank) -> list[Probe]:
    """Combinations that may still be chosen. worst: the worst rank that counts as fitting, until something does."""
    space, best = exploration.space, choose(exploration, worst)
    if best is not None:
        worst = exploration.found[best].fit_rank
        if exploration.has_room(best):
            choices = [choice for choice in choices if not space.needs_by_block(choice)]
    to_beat, lacking = speed_to_beat(exploration, best), too_much_for_host(exploration)
    probes = (_probe(exploration, choice, worst, lacking) for choice in choices)
    return [probe for probe in probes if probe is not None and probe.speed > to_beat(space.level(probe.choice))]


def _probe(
    exploration: Exploration, choice: Combination, worst: FitRank, lacking: Collection[HostDemand]
) -> Probe | None:
    """The micro-batch at which to evaluate a combination next; None where it fits nowhere or is dominated. lacking: as
    `too_much_for_host`."""
    if choice in exploration.refused or ruled_out(exploration, choice):
        return None
    known = {micro: found.fit_rank <= worst for (other, micro), found in exploration.found.items() if other == choice}
    above = max((micro for micro, fits in known.items() if fits), default=0)
    below = min((micro for micro, fits in known.items() if not fits and micro > above), default=1 << 62)
    forecast, batch = exploration.forecasts.of(choice), exploration.space.samples_per_device
    sizes = host_holds(exploration, choice, exploration.sizes, lacking)
    if exploration.space.needs_by_block(choice):  # of smaller ones a sweep holds so many that a trace takes long
        usual = default_micro_batch(exploration.space.recipe, exploration.device)
        sizes = [micro for micro in sizes if 4 * micro >= usual] or sizes
    open_sizes = [micro for micro in sizes  # a step's only micro-batch finds no gradients
                  if above < micro and micro not in known and (micro < below or micro == batch)]
    possible = exploration.fitting(forecast.optimistic, open_sizes, worst)
    if not possible or _preferred_serves(exploration, choice, worst, lacking):
        return None
    largest = exploration.space.recipe_for(choice, possible[-1])
    together = largest.accumulation != "auto" and largest.accumulation.by_block  # the fewer the better, and as copied
    speed = exploration.speed_at(min(forecast.optimistic.step_seconds(size, batch) for size in possible), largest)
    expected = exploration.fitting(forecast.expected, possible, worst)
    sizes = expected or possible[:1]
    micro, timed, seconds = sizes[-1], forecast.expected.known, forecast.expected.step_seconds
    if (forecast.expected.seconds.slope or len(timed) > 1) and not together:  # else other micro-batches' are not known
        sizes = [size for size in sizes if size >= min(timed)] or sizes[-1:]  # below, launches may bind
        least = min(seconds(size, batch) for size in sizes)
        micro = next(size for size in sizes if seconds(size, batch) <= least * (1 + NO_GAIN))
    return Probe(choice, micro, speed, micro in expected, forecast.unknown)


def _preferred_serves(
    exploration: Exploration, choice: Combination, worst: FitRank, lacking: Collection[HostDemand]
) -> bool:
    """Whether a setting of one of its techniques that is never slower is likely to fit, and there about as fast as at
    the largest micro-batch at which the combination itself is likely to fit."""
    batch = exploration.space.samples_per_device

    def largest(of: Combination) -> int:
        sizes = host_holds(exploration, of, exploration.sizes, lacking)
        return max(exploration.fitting(exploration.forecasts.of(of).expected, sizes, worst), default=0)

    own = max(largest(choice), 1)
    for other in exploration.space.preferred(choice):
        micro, seconds = largest(other), exploration.forecasts.of(other).expected.step_seconds
        if micro and seconds(micro, batch) <= (1 + CLOCK_ERROR) * seconds(own, batch):
            return True
    return False


def ruled_out(exploration: Exploration, choice: Combination) -> bool:
    """Whether it holds a value that cannot be built, or one that another, which can stand in its place, is declared to
    beat in memory and time."""
    space, broken = exploration.space, exploration.unbuildable
    for field, value in zip(space.fields, choice, strict=True):
        if (field, value) in broken:
            return True
        better = space.dominating(field, value)
        if better is None or (field, better) in broken:
            continue
        other = space.with_value(choice, field, better)
        if space.allows(other) and other not in exploration.refused:
            return True
    return False
