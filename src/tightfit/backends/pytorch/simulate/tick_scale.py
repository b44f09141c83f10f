"""Tick scaling of a trace, so that events can be inserted that torch makes out of its sight."""

from __future__ import annotations

from dataclasses import replace

from tightfit.trace import Trace

TICK_SCALE = 4
"""Factor of every tick."""


def widen_ticks(trace: Trace) -> Trace:
    """The trace with its ticks further apart."""

    def later(tick: int) -> int:
        return TICK_SCALE * tick

    return replace(
        trace,
        ops=[replace(op, tick=later(op.tick), after=tuple(map(later, op.after))) for op in trace.ops],
        allocations=[replace(a, born=later(a.born), died=None if a.died is None else later(a.died),
                             category_since=later(a.category_since)) for a in trace.allocations],
        spans=[replace(span, start=later(span.start), stop=later(span.stop)) for span in trace.spans],
    )  # fmt: skip
