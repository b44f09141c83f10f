"""Overlap of copies, or of communication, with compute: how much longer they make a step.

What they add is the step's time less that of the same step in which they take none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tightfit.planning.timing.streams import Elapsed, Segment, simulate
from tightfit.trace import Stream


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of one step's transfers with its compute.

    seconds: of the transfers, one after the other. added: seconds that they make the step longer by. step_seconds: of
        the step, with them.
    """

    seconds: float
    added: float
    step_seconds: float

    @property
    def hidden(self) -> float:
        """Share of their seconds that the step is not made longer by."""
        return 1 - min(self.added / self.seconds, 1.0)

    @property
    def speed(self) -> float:
        """Share of the speed of the same step with transfers that take no time."""
        return 1 - self.added / self.step_seconds


def busy_seconds(segments: Sequence[Segment], stream: Stream) -> float:
    """Seconds of a stream's work in a step."""
    return sum(piece.work * times for pieces, times in segments for piece in pieces if piece.stream is stream)


def without(segments: Sequence[Segment], streams: Collection[Stream]) -> Elapsed:
    """A step in which the work of some streams takes no time."""
    free = [([piece._replace(work=0.0) if piece.stream in streams else piece for piece in pieces], times)
            for pieces, times in segments]
    return simulate(free, Stream.COMPUTE)
