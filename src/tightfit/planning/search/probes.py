"""Probes: which combinations of a space may still be the best one, and at which micro-batch each is evaluated next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tightfit.planning.costs import FitRank
from tightfit.planning.search.choose import choose
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, worst_rank
from tightfit.planning.search.forecast import FieldValue
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


def probes_of(exploration: Exploration, choices: Sequence[Combination], with_margin: bool) -> list[Probe]:
    """Combinations that may still be chosen: milder than the best one and nearly as fast, else faster than the fastest
    as mild by more than the clock's error."""
    level, best = exploration.space.level, choose(exploration, with_margin)
    if best is not None and exploration.has_room(best):
        choices = [choice for choice in choices if not exploration.space.streams(choice)]
    milder, harsher, worst = 0.0, 0.0, worst_rank(with_margin)
    if best is not None:
        worst = exploration.found[best].fit_rank
        milder = exploration.speed(best) / (1 + CLOCK_ERROR)
        alike = [pair for pair, found in exploration.found.items()
                 if found.fit_rank <= worst and level(pair[0]) == level(best[0])]
        harsher = (1 + CLOCK_ERROR) * max(map(exploration.speed, alike))
    return [probe for choice in choices if (probe := _probe(exploration, choice, with_margin, worst)) is not None
            and probe.speed > (milder if best is not None and level(choice) < level(best[0]) else harsher)]


def _probe(exploration: Exploration, choice: Combination, with_margin: bool, worst: FitRank) -> Probe | None:
    """The micro-batch at which to evaluate a combination next; None where it fits nowhere or is dominated. worst: the
    worst rank that counts as fitting."""
    if choice in exploration.refused or dominated(exploration, choice) or _lacks_host_memory(exploration, choice):
        return None
    known = {micro: found.fit_rank <= worst for (other, micro), found in exploration.found.items() if other == choice}
    above = max((micro for micro, fits in known.items() if fits), default=0)
    below = min((micro for micro, fits in known.items() if not fits and micro > above), default=1 << 62)
    forecast, batch = exploration.forecasts.of(choice), exploration.space.samples_per_device
    open_sizes = [micro for micro in exploration.sizes  # a step's only micro-batch finds no gradients
                  if above < micro and micro not in known and (micro < below or micro == batch)]
    usable = exploration.usable_bytes(with_margin) / exploration.allocator_overhead
    fitting = [micro for micro in open_sizes if forecast.best.peak(micro, batch) <= usable]
    if not fitting or _preferred_serves(exploration, choice, usable):
        return None
    largest = exploration.space.recipe_for(choice, fitting[-1])
    together = largest.accumulation != "auto" and largest.accumulation.by_block  # the fewer the better, and as copied
    speed = exploration.speed_of(forecast.best.step_seconds(fitting[-1], batch), largest)
    likely = [micro for micro in fitting if forecast.likely.peak(micro, batch) <= usable] or fitting[:1]
    micro = likely[-1]
    if forecast.likely.seconds.slope and not together:  # else nothing is known of other micro-batches' times
        enough = forecast.likely.step_seconds(micro, batch) * (1 + NO_GAIN)
        micro = next(micro for micro in likely if forecast.likely.step_seconds(micro, batch) <= enough)
    fits = forecast.likely.peak(micro, batch) <= usable
    return Probe(choice, micro, speed, fits, forecast.unknown)


def _preferred_serves(exploration: Exploration, choice: Combination, usable: float) -> bool:
    """Whether a setting of one of its techniques that is never slower is likely to fit, and there about as fast as at
    the largest micro-batch at which the combination itself is likely to fit."""
    batch = exploration.space.samples_per_device

    def largest(of: Combination) -> int:
        likely = exploration.forecasts.of(of).likely
        return max((micro for micro in exploration.sizes if likely.peak(micro, batch) <= usable), default=0)

    own = max(largest(choice), 1)
    for other in exploration.space.preferred(choice):
        micro, seconds = largest(other), exploration.forecasts.of(other).likely.step_seconds
        if micro and seconds(micro, batch) <= (1 + CLOCK_ERROR) * seconds(own, batch):
            return True
    return False


def _lacks_host_memory(exploration: Exploration, choice: Combination) -> bool:
    """Whether the host's memory is too small for a combination at any micro-batch: by what is declared of weights,
    gradients and states, for it and the device together, or as one was traced that keeps no more of them there."""
    space, device = exploration.space, exploration.device
    offloaded = space.offloaded_bytes_per_parameter(choice)
    if not offloaded or not device.host_bytes:
        return False
    held = (space.bytes_per_parameter(choice) + offloaded) * exploration.forecasts.parameters
    lacking = (other for (other, _), found in exploration.found.items() if found.estimate.memory.host_too_small)
    return held > device.memory_bytes + device.host_bytes or any(
        space.offloaded_bytes_per_parameter(other) <= offloaded for other in lacking)


def dominated(exploration: Exploration, choice: Combination) -> bool:
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
