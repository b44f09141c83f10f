"""The predicted step beside the measured one: bytes by category, seconds by phase and by op class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tightfit.profiles import Profile
from tightfit.reporting.report.breakdown import TimedOp, by_class
from tightfit.reporting.report.headline import phases, predicted_step
from tightfit.reporting.report.memory import CATEGORIES, MemoryCurve
from tightfit.trace import Trace


@dataclass(frozen=True)
class Pair:
    """A figure, measured and predicted: bytes, or seconds."""

    name: str
    measured: float
    predicted: float

    @property
    def residual(self) -> float:
        """What the prediction is too high by."""
        return self.predicted - self.measured


def held_at_peak(trace: Trace, curve: MemoryCurve) -> dict[str, int]:
    """Bytes by category where the step's memory is highest."""
    held = trace.by_category(curve.peak_tick)
    return {category.value: held[category] for category in CATEGORIES}


def category_pairs(profile: Profile, curves: dict[str, MemoryCurve]) -> list[Pair]:
    """Bytes by category, each at its own step's peak, and their sum. Empty where either is missing."""
    if profile.measured is None or profile.predicted is None or len(curves) < 2:
        return []
    measured = held_at_peak(profile.measured, curves["measured"])
    predicted = held_at_peak(profile.predicted, curves["predicted"])
    pairs = [Pair(name, measured[name], predicted[name]) for name in measured if measured[name] or predicted[name]]
    return [*pairs, Pair("all", sum(measured.values()), sum(predicted.values()))]


def phase_pairs(profile: Profile) -> list[Pair]:
    """Wall seconds by phase and of the step. Empty without a prediction."""
    if not profile.predicted_seconds:
        return []
    pairs = [Pair(phase.value, measured, predicted or 0.0) for phase, measured, predicted in phases(profile)]
    return [*pairs, Pair("step", profile.step_seconds, predicted_step(profile))]


def class_pairs(measured: Iterable[TimedOp], predicted: Iterable[TimedOp]) -> list[Pair]:
    """Seconds of ops by class, waiting left out, and their sum. Empty where either has none that is timed."""
    ours = {kind: sum(row.values()) for kind, row in by_class(measured).items()}
    guess = {kind: sum(row.values()) for kind, row in by_class(predicted).items()}
    if not any(ours.values()) or not any(guess.values()):
        return []
    pairs = [Pair(kind.value, ours.get(kind, 0.0), guess.get(kind, 0.0)) for kind in {**ours, **guess}]
    return [*pairs, Pair("all", sum(ours.values()), sum(guess.values()))]


