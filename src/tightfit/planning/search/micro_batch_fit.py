"""A combination's peak and time at any micro-batch, from few traces; and what a change of one field does to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightfit.planning.search.evaluate import Evaluated


@dataclass(frozen=True, kw_only=True)
class Line:
    """An affine function."""

    base: float
    slope: float

    def __call__(self, at: float) -> float:
        return self.base + self.slope * at

    @classmethod
    def through(cls, x: float, y: float, u: float, v: float) -> Line:
        """The line through two points, with neither part below zero."""
        slope = max((v - y) / (u - x), 0.0)
        return cls(base=max(y - slope * x, 0.0), slope=slope)


@dataclass(frozen=True, kw_only=True)
class MicroBatchFit:
    """Bytes of the peaks, affine in the micro-batch, and seconds of a step, affine in the number of micro-batches.

    passes, elsewhere: as of `Evaluated`. held: bytes of weights, gradients and states. gradients: of these; the passes
    of a step's only micro-batch hold none yet.
    """

    passes: Line
    elsewhere: Line
    seconds: Line
    held: float
    gradients: float

    def peak(self, micro: int, batch: int) -> float:
        """Bytes allocated at the peak."""
        alone = self.gradients if micro >= batch else 0.0
        return max(self.passes(micro) - alone, self.elsewhere(micro), 0.0)

    def step_seconds(self, micro: int, batch: int) -> float:
        """Seconds of a step; a smaller last micro-batch counts for its share."""
        return self.seconds(batch / micro)

    def changed(self, effect: Effect) -> MicroBatchFit:
        """The same with another value of one field."""
        passes = Line(base=max(self.passes.base + effect.held, 0.0), slope=self.passes.slope * effect.slope)
        elsewhere = Line(base=max(self.elsewhere.base + effect.elsewhere, 0.0), slope=self.elsewhere.slope)
        seconds = Line(base=self.seconds.base * effect.time, slope=self.seconds.slope * effect.time)
        return MicroBatchFit(passes=passes, elsewhere=elsewhere, seconds=seconds, held=max(self.held + effect.held, 0),
                             gradients=self.gradients)

    @classmethod
    def of(cls, points: Mapping[int, Evaluated], batch: int, like: MicroBatchFit | None) -> MicroBatchFit:
        """Of what was evaluated, by micro-batch; `like`: a relative's, whose share of what is fixed stands in where
        there is but one point."""
        low, high = min(points), max(points)
        one, two = points[low], points[high]
        first = _passes(one, low, batch)
        if low != high:
            return cls(
                passes=Line.through(low, first, high, _passes(two, high, batch)),
                elsewhere=Line.through(low, one.elsewhere, high, two.elsewhere),
                seconds=Line.through(batch / high, two.seconds, batch / low, one.seconds),
                held=one.held, gradients=one.gradients,
            )  # fmt: skip
        growing = max(first - one.held, 0.0)
        if like is not None and like.passes(low) > like.held:
            growing *= min(like.passes.slope * low / (like.passes(low) - like.held), 1.0)
        each = 0.0 if like is None else like.seconds.slope * one.seconds / max(like.step_seconds(low, batch), 1e-12)
        return cls(
            passes=Line(base=first - growing, slope=growing / low),
            elsewhere=Line(base=one.elsewhere, slope=0.0),
            seconds=Line(base=max(one.seconds - each * batch / low, 0.0), slope=each),
            held=one.held, gradients=one.gradients,
        )  # fmt: skip


def _passes(found: Evaluated, micro: int, batch: int) -> float:
    return found.passes + (found.gradients if micro >= batch else 0)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What another value of one field does: bytes held and elsewhere that it adds, and the factors by which it changes
    what a sample keeps and the time."""

    held: float = 0.0
    elsewhere: float = 0.0
    slope: float = 1.0
    time: float = 1.0

    def then(self, other: Effect) -> Effect:
        """This change and then another."""
        return Effect(held=self.held + other.held, elsewhere=self.elsewhere + other.elsewhere,
                      slope=self.slope * other.slope, time=self.time * other.time)

    @classmethod
    def between(cls, one: MicroBatchFit, other: MicroBatchFit, micro: int, batch: int) -> Effect:
        """From one combination to another that differs in that field alone."""
        seconds = one.step_seconds(micro, batch)
        return cls(
            held=other.passes.base - one.passes.base, elsewhere=other.elsewhere.base - one.elsewhere.base,
            slope=other.passes.slope / one.passes.slope if one.passes.slope else 1.0,
            time=other.step_seconds(micro, batch) / seconds if seconds else 1.0,
        )  # fmt: skip


def unknown_states(fit: MicroBatchFit) -> MicroBatchFit:
    """The fit where nothing is known of what is held."""
    return replace(fit, passes=replace(fit.passes, base=0.0), elsewhere=Line(base=0.0, slope=0.0), held=0.0)
