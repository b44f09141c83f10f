"""Room between the events of a trace, for what torch does there out of its sight."""

from __future__ import annotations

from dataclasses import replace

from tightfit.trace import Trace

BETWEEN = 4
"""Ticks that one becomes."""


def spread(trace: Trace) -> Trace:
    """The trace with its ticks further apart."""

    def later(tick: int) -> int:
        return BETWEEN * tick

    return replace(
        trace,
        ops=[replace(op, tick=later(op.tick), after=tuple(map(later, op.after))) for op in trace.ops],
        allocations=[replace(a, born=later(a.born), died=None if a.died is None else later(a.died),
                             category_since=later(a.category_since)) for a in trace.allocations],
        spans=[replace(span, start=later(span.start), stop=later(span.stop)) for span in trace.spans],
    )  # fmt: skip
