"""Lanes by hand: how long each works, and what of copying runs beside compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.profiling.profiled import profile
from tightfit.profiling.report.copies import lanes_of
from tightfit.trace import Phase, Stream
from tightfit.trace.lanes import GAP_DIVISOR, Stretch, joined


def lane(stream, begin, end, phase=Phase.FORWARD):
    return Stretch(stream, phase, begin, end)


def test_copying_beside_compute_is_counted_once_for_both_directions():
    made = (lane(Stream.COMPUTE, 0.0, 2.0), lane(Stream.COMPUTE, 3.0, 6.0, Phase.BACKWARD),
            lane(Stream.COPY_IN, 1.0, 4.0), lane(Stream.COPY_OUT, 3.5, 5.0))
    found = lanes_of(replace(profile(), lanes={"measured": made, "predicted": ()}))
    assert list(found) == ["measured"]
    assert found["measured"].busy == {Stream.COMPUTE: 5.0, Stream.COPY_IN: 3.0, Stream.COPY_OUT: 1.5}
    assert found["measured"].copying == 4.0
    assert found["measured"].hidden == pytest.approx(0.75)


def test_stretches_with_gaps_too_short_to_be_seen_are_one():
    short = 1.0 / GAP_DIVISOR / 2
    made = [lane(Stream.COMPUTE, 0.0, 0.4), lane(Stream.COMPUTE, 0.4 + short, 0.5),
            lane(Stream.COMPUTE, 0.6, 0.7), lane(Stream.COMPUTE, 0.7, 1.0, Phase.BACKWARD),
            lane(Stream.COPY_IN, 0.0, 0.1), lane(Stream.COPY_IN, 0.5, 0.5)]
    assert [(s.begin, s.end) for s in joined(made)] == [(0.0, 0.5), (0.6, 0.7), (0.7, 1.0), (0.0, 0.1)]
    assert joined([]) == ()
