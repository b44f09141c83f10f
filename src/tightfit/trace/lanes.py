"""Lanes: when the device computes, copies in and copies out over one step, as stretches of seconds.

Ops that follow each other closely are one stretch: a step has tens of thousands of them, and a picture a few hundred
points.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tightfit.trace import Phase, Stream

GAP_DIVISOR = 1500
"""A gap shorter than such a part of the whole is not kept."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Seconds, from the step's beginning, in which a stream has work of a phase. What is fetched for a step while the
    one before ends begins before 0."""

    stream: Stream
    phase: Phase
    begin: float
    end: float


def joined(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Fewer stretches, by stream and in order of time: what follows in the same phase, with a gap too short to be seen,
    is one."""
    ordered = sorted((s for s in stretches if s.end > s.begin), key=lambda s: (list(Stream).index(s.stream), s.begin))
    if not ordered:
        return ()
    gap = (max(s.end for s in ordered) - min(s.begin for s in ordered)) / GAP_DIVISOR
    found = [ordered[0]]
    for each in ordered[1:]:
        last = found[-1]
        if (each.stream, each.phase) == (last.stream, last.phase) and each.begin - last.end <= gap:
            found[-1] = Stretch(last.stream, last.phase, last.begin, max(each.end, last.end))
        else:
            found.append(each)
    return tuple(found)
