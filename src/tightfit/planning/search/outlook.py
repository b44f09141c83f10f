"""What a combination that was not evaluated is likely to cost, and can cost at best, from those that were.

A change of one field does to one combination about what it did to another: so much more held, so many times the bytes
of a sample, so many times the time. What no pair of evaluated combinations says is bounded by what techniques declare:
whose step theirs is not faster than (`slower_than`), by how much about (`slowdown`), which variants need less memory
(`thrift`), and whether they change what weights, gradients and states hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.micro_batch_fit import Effect, Line, MicroBatchFit, unknown_states
from tightfit.planning.search.space import ALLOCATOR, Choice, Space
from tightfit.techniques import Technique

CERTAIN = 0.6
"""The share of a declared slowdown that is counted on."""
TYPICAL = 0.6
"""The share of a sample's bytes that an unknown variant is taken to keep until it is evaluated."""
CARRIED = 0.8
"""The same share of what other combinations say: as little as that may be what it needs."""

NEAREST = 4
"""How many of the nearest evaluated combinations are asked."""

Unknown = tuple[str, Any]
"""A field, and a value that no evaluated combination tells anything of."""


@dataclass(frozen=True)
class Outlook:
    """likely: what is expected. best: what it can be at best. unknown: what neither knows. indirect: how many
    changes are known by way of a third value alone."""

    likely: MicroBatchFit
    best: MicroBatchFit
    unknown: tuple[Unknown, ...] = ()
    indirect: int = 0


class Outlooks:
    """Of every combination of a space, from `points`: what was evaluated, by combination and micro-batch."""

    def __init__(self, space: Space, points: Mapping[Choice, Mapping[int, Evaluated]]) -> None:
        self.space = space
        self.batch = space.recipe.batch_size
        self.fits: dict[Choice, MicroBatchFit] = {}
        for choice in sorted(points, key=lambda c: (-min(len(points[c]), 2), space.departures(c))):
            self.fits[choice] = MicroBatchFit.of(points[choice], self.batch, self._like(choice, points))
        self._only = {choice: next(iter(known)) for choice, known in points.items() if len(known) == 1}
        self._pairs: dict[tuple[str, Any, Any], list[tuple[Choice, Effect]]] = {}
        self._effects: dict[tuple[str, Any, Any, Choice], tuple[Effect | None, int]] = {}
        self._outlooks: dict[Choice, Outlook] = {}
        for one, mine in self.fits.items():
            for other, its in self.fits.items():
                fields = space.differing(one, other)
                if len(fields) == 1:
                    at = space.fields.index(fields[0])
                    micro = max(points[other])
                    effect = Effect.between(mine, its, micro, self.batch)
                    self._pairs.setdefault((fields[0], one[at], other[at]), []).append((one, effect))

    def of(self, choice: Choice) -> Outlook:
        """The outlook of a combination; something must have been evaluated."""
        known = self.fits.get(choice)
        if known is not None:
            only = self._only.get(choice)
            return Outlook(known, known if only is None else _flatter(known, only))
        key = tuple(value for field, value in zip(self.space.fields, choice, strict=True) if field != ALLOCATOR)
        if key not in self._outlooks:
            self._outlooks[key] = self._nearest(choice)
        return self._outlooks[key]

    def _nearest(self, choice: Choice) -> Outlook:
        """By those of the nearest evaluated combinations that leave least unknown."""
        by_distance = sorted(self.fits, key=lambda other: len(self.space.differing(choice, other)))
        outlooks = [self._from(relative, choice) for relative in by_distance[:NEAREST]]
        return min(outlooks, key=lambda outlook: (len(outlook.unknown), outlook.indirect))

    def _from(self, relative: Choice, choice: Choice) -> Outlook:
        """The outlook of a combination by one that was evaluated."""
        likely = best = self.fits[relative]
        unknown: list[Unknown] = []
        indirect = 0
        for field in self.space.differing(choice, relative):
            at = self.space.fields.index(field)
            old, new = relative[at], choice[at]
            if field == ALLOCATOR:
                continue
            effect, third = self._effect(field, old, new, relative)
            indirect += third
            if effect is None:
                unknown.append((field, new))
                likely, best = self._unknown(field, old, new, relative, likely, best)
            else:
                likely, best = likely.changed(effect), best.changed(effect)
        passes = replace(best.passes, slope=best.passes.slope * CARRIED)
        return Outlook(likely, replace(best, passes=passes), tuple(unknown), indirect)

    def _like(self, choice: Choice, points: Mapping[Choice, Mapping[int, Evaluated]]) -> MicroBatchFit | None:
        """The fit of the nearest combination that was evaluated at two micro-batches."""
        whole = [c for c in self.fits if len(points[c]) > 1 and c != choice]
        nearest = min(whole, key=lambda other: len(self.space.differing(choice, other)), default=None)
        return None if nearest is None else self.fits[nearest]

    def _effect(self, field: str, old: Any, new: Any, near: Choice) -> tuple[Effect | None, int]:
        """What changing a field does, by the two evaluated combinations nearest to `near` that differ in it alone, and
        0; by way of a third value where no pair holds both, and 1."""
        key = (field, old, new, near)
        if key not in self._effects:
            direct = self._pair(field, old, new, near)
            ways = ((self._pair(field, old, value, near), self._pair(field, value, new, near))
                    for value in (self.space.values[field] if direct is None else ()))
            third = next((one.then(other) for one, other in ways if one is not None and other is not None), None)
            self._effects[key] = (direct, 0) if direct is not None else (third, 1)
        return self._effects[key]

    def _pair(self, field: str, old: Any, new: Any, near: Choice) -> Effect | None:
        pairs = self._pairs.get((field, old, new), ())
        nearest = min(pairs, key=lambda pair: len(self.space.differing(near, pair[0])), default=None)
        return None if nearest is None else nearest[1]

    def _unknown(
        self, field: str, old: Any, new: Any, near: Choice, likely: MicroBatchFit, best: MicroBatchFit
    ) -> tuple[MicroBatchFit, MicroBatchFit]:
        """Both fits with a value of which only its declaration is known."""
        if not isinstance(new, Technique):
            return likely, best
        floor, time = None, 0.0
        for value in self.space.values[field]:
            effect = Effect() if value == old else self._effect(field, old, value, near)[0]
            if effect is not None and value.name == new.slower_than(self.space.device):
                time = max(time, effect.time * (1 + CERTAIN * new.slowdown))
            if effect is not None and value.thrift > new.thrift and (floor is None or effect.slope < floor.slope):
                floor = effect
        if new.changes_states:
            lowest = unknown_states(best)
        elif floor is not None:
            lowest = best.changed(floor)
        else:
            lowest = replace(best, passes=Line(base=min(best.held, best.passes.base), slope=0.0))
        usual = replace(likely.passes, slope=likely.passes.slope * max(TYPICAL, 0.0 if floor is None else floor.slope))
        factor = time or 1.0
        return (replace(likely, passes=usual, seconds=_times(likely.seconds, factor)),
                replace(lowest, seconds=_times(best.seconds, time)))


def _flatter(fit: MicroBatchFit, at: int) -> MicroBatchFit:
    """A fit of one point, at that micro-batch, with as little for other samples as it may be."""
    slope = fit.passes.slope * CARRIED
    return replace(fit, passes=Line(base=fit.passes.base + (fit.passes.slope - slope) * at, slope=slope))


def _times(line: Line, factor: float) -> Line:
    return Line(base=line.base * factor, slope=line.slope * factor)
