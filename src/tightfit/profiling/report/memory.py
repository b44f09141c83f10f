"""Memory over one step: bytes by category along the step's own seconds, measured and predicted on one axis.

The axis is the seconds of a plain step: the wait for data, then forward and backward of each micro-batch, then the
optimizer. A measured trace's ticks are stretched to it phase by phase, for the traced step took longer than a plain
one. A predicted trace is stretched to the measured phases, so that the two curves differ in memory alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tightfit.profiling.profile import Profile
from tightfit.profiling.step import step_of, steps_of
from tightfit.trace import WALL_PHASES, Allocation, Category, Phase, Place, Trace

PART_PHASES = tuple(phase for phase in WALL_PHASES if phase is not Phase.DATA)
CURVE_POINTS = 900
"""Points that a curve is drawn with at most, but for its ends."""
MOST_PARTS = 256
"""Parts of a step that are drawn one by one; of more, those that repeat are drawn once."""

FOREVER = (1 << 63) - 1
"""A tick that no trace has."""


@dataclass(frozen=True)
class CurvePart:
    """A part of a step: its phase, its ticks, and the seconds of the step between which it is drawn."""

    phase: Phase
    start: int
    stop: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Memory along a step. seconds: float (N,), never falling. held: bytes by category, int (N,) each, from that point
    to the next. peak_bytes, peak_seconds: where it is highest. parts: of the step, over which it is drawn."""

    seconds: np.ndarray
    held: Mapping[Category, np.ndarray]
    peak_bytes: int
    peak_seconds: float
    parts: tuple[CurvePart, ...]

    @property
    def total(self) -> np.ndarray:
        return np.asarray(np.sum(np.stack(list(self.held.values())), axis=0))


def parts_of(trace: Trace) -> list[tuple[Phase, int, int]]:
    """The forward and backward passes of the last step and its optimizer, in the order they run: phase and ticks."""
    step = step_of(trace)
    names = {phase.value: phase for phase in PART_PHASES}
    inside = sorted((s for s in trace.spans if s.name in names and step.start <= s.start < step.stop),
                    key=lambda s: s.start)
    together = sum(span.times for span in inside)
    parts: list[tuple[Phase, int, int]] = []
    for times, spans in groupby(inside, key=lambda s: s.times):
        once = [(names[span.name], span.start, min(span.stop, step.stop)) for span in spans]
        parts += once * (times if together <= MOST_PARTS else 1)
    return parts or [(Phase.FORWARD, step.start, step.stop)]


def layout(parts: Sequence[tuple[Phase, int, int]], seconds: Mapping[Phase, float]) -> list[CurvePart]:
    """Places at which each part of a step is drawn: each phase has its seconds, in equal shares. Without them a tick
    is a nanosecond."""
    counts = Counter(phase for phase, _, _ in parts)
    known = any(seconds.get(phase) for phase in PART_PHASES)
    at, found = seconds.get(Phase.DATA, 0.0), []
    for phase, start, stop in parts:
        width = seconds.get(phase, 0.0) / counts[phase] if known else (stop - start) / 1e9
        found.append(CurvePart(phase, start, stop, at, at + width))
        at += width
    return found


def curves(profile: Profile, place: Place = Place.DEVICE) -> dict[str, MemoryCurve]:
    """Memory curves of one place by `measured` and `predicted`, of whichever step there is."""
    seconds = profile.phase_seconds or profile.predicted_seconds
    found = {name: curve(step.trace, layout(parts_of(step.trace), seconds), place)
             for name, step in steps_of(profile).items()}
    return {name: each for name, each in found.items() if each.seconds.size}


def curve(trace: Trace, parts: Sequence[CurvePart], place: Place = Place.DEVICE) -> MemoryCurve:
    """The trace's memory over those parts."""
    ticks, held = by_category(trace.lying_in(place))
    step = step_of(trace)
    places, seconds = [], []
    for number, part in enumerate(parts):
        following = parts[number + 1].start if number + 1 < len(parts) else step.stop
        stop = following if following > part.start else part.stop  # a part that repeats is followed by an earlier one
        first = max(int(np.searchsorted(ticks, part.start, side="right")) - 1, 0)
        chosen = np.arange(first, int(np.searchsorted(ticks, stop, side="left")))
        share = np.clip((ticks[chosen] - part.start) / max(part.stop - part.start, 1), 0.0, 1.0)
        places.append(chosen)
        seconds.append(part.begin + share * (part.end - part.begin))
    at, x = np.concatenate(places), np.concatenate(seconds)
    if not at.size:
        return MemoryCurve(seconds=x, held={}, peak_bytes=0, peak_seconds=0.0, parts=())
    total = held[at].sum(axis=1)
    highest = int(np.argmax(total))
    kept = downsample(x, total)
    points = np.concatenate([[at[0]], at[kept], [at[-1]]])
    end = parts[-1].end
    return MemoryCurve(
        seconds=np.concatenate([[0.0], x[kept], [end]]),
        held={category: held[points, i] for i, category in enumerate(Category)},
        peak_bytes=int(total[highest]), peak_seconds=float(x[highest]), parts=tuple(parts),
    )


def downsample(seconds: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Points to draw: of each of CURVE_POINTS equal stretches of time the highest, so that every peak survives."""
    if len(seconds) <= CURVE_POINTS:
        return np.arange(len(seconds))
    width = (float(seconds[-1] - seconds[0]) or 1.0) / CURVE_POINTS
    bucket = np.minimum(((seconds - seconds[0]) / width).astype(np.int64), CURVE_POINTS - 1)
    order = np.lexsort((-total, bucket))
    _, firsts = np.unique(bucket[order], return_index=True)
    return np.sort(order[firsts])


def by_category(allocations: Sequence[Allocation]) -> tuple[np.ndarray, np.ndarray]:
    """Ticks at which memory changes, int64 (N,), and the bytes held from each on, int64 (N, categories)."""
    column = {category: i for i, category in enumerate(Category)}
    changes = []
    for a in allocations:
        died = FOREVER if a.died is None else a.died
        turns = min(max(a.born, a.category_since), died)
        for category, start, stop in ((Category.TEMPORARY, a.born, turns), (a.category, turns, died)):
            changes += [(start, column[category], a.bytes), (stop, column[category], -a.bytes)]
    table = np.array(changes, dtype=np.int64).reshape(-1, 3)
    ticks, rows = np.unique(table[:, 0], return_inverse=True)
    moved = np.zeros((len(ticks), len(Category)), np.int64)
    np.add.at(moved, (rows, table[:, 1]), table[:, 2])
    ends = int(np.searchsorted(ticks, FOREVER))
    return ticks[:ends], np.cumsum(moved, axis=0)[:ends]
