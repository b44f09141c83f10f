"""Forecasts of a combination's peak and step time at any micro-batch, from the combinations that were evaluated.

A change of one field does to one combination about what it did to another: so many times the bytes that a sample keeps,
so many times the time. Where no two evaluated combinations say, the rules of thumb that techniques declare stand in
(`Technique.kept_share`, `Technique.slowdown`). Bytes of weights, gradients and optimizer states are as declared
(`Technique.bytes_per_parameter`), from the nearest combination that was evaluated; what nothing declares, such as how
many of them are embeddings', is learned from a pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tightfit.devices import Device
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.space import Combination, Space
from tightfit.techniques import Technique

HEURISTIC_SLACK = 0.3
"""Share by which memory and the change of time may be better than a rule of thumb says."""
NEIGHBORS = 4
"""Evaluated combinations that are asked for one that was not."""

FieldValue = tuple[str, Technique]
"""A field, and a value of it."""


class Affine(NamedTuple):
    """base + slope * x."""

    base: float
    slope: float

    def __call__(self, at: float) -> float:
        return self.base + self.slope * at

    @classmethod
    def through(cls, x: float, y: float, u: float, v: float) -> Affine:
        """The line through two points, with neither part below zero."""
        slope = max((v - y) / (u - x), 0.0)
        return cls(base=max(y - slope * x, 0.0), slope=slope)


class Effect(NamedTuple):
    """Factors by which another value of one field changes what a sample keeps, and the time of a step; and bytes of
    weights, gradients and states that it holds more where it is declared to hold as many."""

    kept: float = 1.0
    time: float = 1.0
    held: float = 0.0

    def then(self, other: Effect) -> Effect:
        """This change and then another."""
        return Effect(self.kept * other.kept, self.time * other.time, self.held + other.held)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Bytes of the peaks, affine in the micro-batch, and seconds of a step, affine in the number of micro-batches.

    passes, outside: as of `Evaluated`. held: bytes of weights, gradients and states. gradients: of these; the passes
    of a step's only micro-batch hold none yet. known: seconds at the micro-batches that were evaluated: a small one can
    be the fastest, where the cache holds what it works on.
    """

    passes: Affine
    outside: Affine
    seconds: Affine
    held: float
    gradients: float
    known: Mapping[int, float]

    def peak(self, micro: int, batch: int) -> float:
        """Bytes allocated at the peak."""
        alone = self.gradients if micro >= batch else 0.0
        return max(self.passes(micro) - alone, self.outside(micro), 0.0)

    def step_seconds(self, micro: int, batch: int) -> float:
        """Seconds of a step; a smaller last micro-batch counts for its share."""
        return self.known.get(micro) or self.seconds(batch / micro)

    def changed(self, effect: Effect, declared: float = 0.0) -> CostModel:
        """The costs with other values of some fields, declared to hold so many bytes more."""
        held = declared + effect.held
        return replace(
            self, passes=Affine(max(self.passes.base + held, 0.0), self.passes.slope * effect.kept),
            outside=Affine(max(self.outside.base + held, 0.0), self.outside.slope),
            seconds=Affine(self.seconds.base * effect.time, self.seconds.slope * effect.time),
            held=max(self.held + held, 0.0),
            known={micro: seconds * effect.time for micro, seconds in self.known.items()},
        )  # fmt: skip

    def effect(self, other: CostModel, micro: int, batch: int, declared: float) -> Effect:
        """The change from this combination to another, declared to hold so many bytes more."""
        seconds, kept = self.step_seconds(micro, batch), self.passes.slope
        return Effect(other.passes.slope / kept if kept else 1.0,
                      other.step_seconds(micro, batch) / seconds if seconds else 1.0,
                      0.0 if declared else other.held - self.held)

    @classmethod
    def of(cls, points: Mapping[int, Evaluated], batch: int, similar: CostModel | None) -> CostModel:
        """The growth of what was evaluated, by micro-batch. similar: another combination's, whose shares of what grows
        are taken where there is but one point."""
        low, high = min(points), max(points)
        one, two = points[low], points[high]
        known = {micro: found.seconds for micro, found in points.items()}
        first = one.passes_when_accumulating
        if low != high:
            return cls(
                passes=Affine.through(low, first, high, two.passes_when_accumulating),
                outside=Affine.through(low, one.outside, high, two.outside),
                seconds=Affine.through(batch / high, two.seconds, batch / low, one.seconds),
                held=one.held, gradients=one.gradients, known=known,
            )  # fmt: skip
        growing = max(first - one.held, 0.0)
        each = 0.0
        if similar is not None:
            growing *= min(similar.passes.slope * low / max(similar.passes(low) - similar.held, 1.0), 1.0)
            share = one.seconds / max(similar.step_seconds(low, batch), 1e-12)
            each = similar.seconds.slope * share
            known = {**{micro: seconds * share for micro, seconds in similar.known.items()}, **known}
        return cls(
            passes=Affine(first - growing, growing / low), outside=Affine(one.outside, 0.0),
            seconds=Affine(max(one.seconds - each * batch / low, 0.0), each), held=one.held, gradients=one.gradients,
            known=known,
        )  # fmt: skip


class Forecast(NamedTuple):
    """expected: the cost. optimistic: the least it can be. unknown: values of which only rules of thumb are known."""

    expected: CostModel
    optimistic: CostModel
    unknown: tuple[FieldValue, ...] = ()


class Change(NamedTuple):
    """The effect of one field's other value: as expected, and the best that it can be; as an evaluated pair showed it,
    or, not `known`, by a rule of thumb."""

    expected: Effect
    optimistic: Effect
    known: bool


class EvaluatedPair(NamedTuple):
    """Two combinations that were evaluated, in how many fields they differ, and the effect of going to the second."""

    one: Combination
    other: Combination
    fields: int
    effect: Effect


class Forecasts:
    """Forecasts of every combination of a space, from `points`: what was evaluated, by combination and micro-batch."""

    def __init__(self, space: Space, points: Mapping[Combination, Mapping[int, Evaluated]]) -> None:
        self.space, self.batch = space, space.samples_per_device
        evaluated = [found for known in points.values() for found in known.values()]
        self.parameters = evaluated[0].parameters if evaluated else 0
        self.allocator_overhead = max(min((found.estimate.memory.peak_reserved / max(found.passes, found.outside, 1)
                                           for found in evaluated), default=1.0), 1.0)
        """The least that the allocator was seen to reserve at a peak, over what was asked of it there."""
        self.cost_models: dict[Combination, CostModel] = {}
        for choice in sorted(points, key=lambda c: (-min(len(points[c]), 2), space.complexity(c))):
            self.cost_models[choice] = CostModel.of(points[choice], self.batch, self._similar(choice, points))
        self._pairs: dict[tuple[str, Any, Any], list[EvaluatedPair]] = {}
        self._forecasts: dict[Combination, Forecast] = {}
        self._changes: dict[Combination, dict[FieldValue, Change]] = {}
        for one, mine in self.cost_models.items():
            for other, its in self.cost_models.items():
                fields = space.differing(one, other)
                effect = mine.effect(its, max(points[other]), self.batch, self._declared(other) - self._declared(one))
                pair = EvaluatedPair(one, other, len(fields), effect)
                for field in fields:
                    key = field, space.value(one, field), space.value(other, field)
                    self._pairs.setdefault(key, []).append(pair)

    def of(self, choice: Combination) -> Forecast:
        """The forecast of a combination; something must have been evaluated."""
        if choice in self.cost_models:
            return Forecast(self.cost_models[choice], self.cost_models[choice])
        if choice not in self._forecasts:
            nearest = sorted(self.cost_models, key=partial(self.space.distance, choice))[:NEIGHBORS]
            forecasts = []
            for neighbor in nearest:
                forecasts.append(self._from(neighbor, choice))
                if not forecasts[-1].unknown:
                    break
            self._forecasts[choice] = min(forecasts, key=lambda forecast: len(forecast.unknown))
        return self._forecasts[choice]

    def _from(self, neighbor: Combination, choice: Combination) -> Forecast:
        """Forecast from one evaluated combination; the rules of thumb that it takes widen its best case."""
        space = self.space
        model, more = self.cost_models[neighbor], self._declared(choice) - self._declared(neighbor)
        expected = optimistic = Effect()
        unknown: list[FieldValue] = []
        changes = self._changes.setdefault(neighbor, {})
        for field, old, new in zip(space.fields, neighbor, choice, strict=True):
            if old == new:
                continue
            change = changes.get((field, new))
            if change is None:
                change = changes[field, new] = self._change(field, old, new, neighbor)
            expected, optimistic = expected.then(change.expected), optimistic.then(change.optimistic)
            if not change.known:
                unknown.append((field, new))
        least, resident = model.changed(optimistic, more), space.without_offload(choice)
        if resident != choice:  # what is kept elsewhere costs no time where all of its copies are hidden
            whole = self.of(resident).optimistic
            least = replace(least, seconds=whole.seconds, known=whole.known)
        return Forecast(model.changed(expected, more), least, tuple(unknown))

    def _declared(self, choice: Combination) -> float:
        """Bytes of weights, gradients and states, as techniques declare them."""
        return self.parameters * self.space.bytes_per_parameter(choice)

    def _change(self, field: str, old: Any, new: Any, neighbor: Combination) -> Change:
        """The effect of one field's other value on an evaluated combination."""
        known = self._effect(field, old, new, neighbor)
        if known is not None:
            return Change(known, known, known=True)
        kept, time = new.kept_share / old.kept_share, _rule_of_thumb(old, new, self.space.device)
        lowest = min(time - HEURISTIC_SLACK * abs(time - 1), self._lowest_time(field, old, new, neighbor))
        freed = self.cost_models[neighbor].held - self._declared(neighbor) if new.preferred == old else 0.0
        best = Effect(kept * (1 - HEURISTIC_SLACK), lowest, -max(freed, 0.0))
        return Change(Effect(kept, time), best, known=False)

    def _effect(self, field: str, old: Any, new: Any, near: Combination) -> Effect | None:
        """The change of one field, by the evaluated pair nearest to `near` that differs in it alone; by way of a third
        value where no pair holds both; None where neither is known."""
        direct = self._pair(field, old, new, near)
        if direct is not None:
            return direct
        ways = ((self._pair(field, old, value, near), self._pair(field, value, new, near))
                for value in self.space.values[field])
        return next((one.then(other) for one, other in ways if one is not None and other is not None), None)

    def _pair(self, field: str, old: Any, new: Any, near: Combination) -> Effect | None:
        pairs = (pair for pair in self._pairs.get((field, old, new), ()) if pair.fields == 1)
        nearest = min(pairs, key=lambda pair: self.space.distance(near, pair.one), default=None)
        return None if nearest is None else nearest.effect

    def _lowest_time(self, field: str, old: Any, new: Any, near: Combination) -> float:
        """The smallest factor of a step's time that one field's change may have, by the evaluated pair that differs in
        fewest other fields, such as one that needs the new value: its factor, over the others' rules of thumb. Infinity
        where no pair has the change."""
        pairs = self._pairs.get((field, old, new), ())
        nearest = min(pairs, key=lambda p: (p.fields, self.space.distance(near, p.one)), default=None)
        if nearest is None:
            return math.inf
        others = [_rule_of_thumb(a, b, self.space.device)
                  for name, a, b in zip(self.space.fields, nearest.one, nearest.other, strict=True) if name != field]
        return nearest.effect.time / math.prod(factor + HEURISTIC_SLACK * abs(factor - 1) for factor in others)

    def _similar(self, choice: Combination, points: Mapping[Combination, Mapping[int, Evaluated]]) -> CostModel | None:
        """The fit of the nearest combination that was evaluated at two micro-batches."""
        whole = [c for c in self.cost_models if len(points[c]) > 1 and c != choice]
        nearest = min(whole, key=partial(self.space.distance, choice), default=None)
        return None if nearest is None else self.cost_models[nearest]


def _rule_of_thumb(old: Technique, new: Technique, device: Device) -> float:
    """The factor by which a step's time changes with another value of one field, as techniques declare it."""
    return (1 + new.slowdown(device)) / (1 + old.slowdown(device))
