"""What a case of the comparison with a GPU is given: a limit from its prediction."""

from __future__ import annotations

import pytest

from tests.benchmark_modules import benchmark
from tightfit.devices import MIB
from tightfit.planning.allocator.replay import replay
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.trace import Allocation, Category, Span, Trace

cases, predictions = map(benchmark, ("gpu_cases", "gpu_predictions"))


def trace_of(*allocations, spans=()):
    """Allocations as (born, died, MiB)."""
    return Trace(origin="predicted", spans=list(spans), allocations=[
        Allocation(born=born, died=died, bytes=round(size * MIB), category=Category.TEMPORARY, category_since=born)
        for born, died, size in allocations
    ])


# 100 MiB and 60 MiB are freed before 150 MiB and 70 MiB come, which fit in neither's place: cached memory can be
# released for them. The third 100 MiB stays.
WASTEFUL = trace_of((1, None, 100), (2, 4, 100), (3, 5, 60), (6, None, 150), (7, None, 70))


def test_a_fill_is_the_share_of_the_limit_that_is_reserved():
    reserved = replay(WASTEFUL, None).peak_reserved
    for percent in (30, 65, 98):
        limit, found = predictions.limit_for(WASTEFUL, cases.Aim("fill", percent), 1 << 40, AllocatorSettings())
        assert found.fits == "yes"
        assert found.peak_reserved / limit == pytest.approx(percent / 100, rel=1e-6)
    capacity = reserved + MIB
    limit, found = predictions.limit_for(WASTEFUL, cases.Aim("fill", 50), capacity, AllocatorSettings())
    assert limit == capacity  # the device has no more


def test_retries_lie_between_what_is_needed_and_what_is_taken():
    limit, found = predictions.limit_for(WASTEFUL, cases.Aim("retries"), 1 << 40, AllocatorSettings())
    assert found.fits == "with-retries"
    assert found.retries
    assert 320 * MIB <= limit < found.peak_reserved


def test_short_is_too_small_by_that_share():
    least = predictions.least_limit(WASTEFUL, replay(WASTEFUL, None), AllocatorSettings())
    assert replay(WASTEFUL, None, limit=least).fits == "with-retries"
    assert replay(WASTEFUL, None, limit=least - 2 * MIB).fits == "no"
    for percent in (2, 5, 10):
        limit, found = predictions.limit_for(WASTEFUL, cases.Aim("short", percent), 1 << 40, AllocatorSettings())
        assert found.fits == "no"
        assert limit * (1 + percent / 100) == pytest.approx(least, rel=1e-6)


def test_what_no_limit_gives_is_said():
    simple = trace_of((1, None, 100), (2, None, 60))
    with pytest.raises(predictions.NoSuchLimit, match="not at all"):
        predictions.limit_for(simple, cases.Aim("retries"), 1 << 40, AllocatorSettings())
    with pytest.raises(predictions.NoSuchLimit, match=r"needs 0\.2 GiB"):
        predictions.limit_for(simple, cases.Aim("fill", 90), 100 * MIB, AllocatorSettings())


def test_phases_count_what_is_alive_as_they_begin():
    spans = [Span(name="forward", start=10, stop=20, step=1), Span(name="backward", start=20, stop=30, step=1),
             Span(name="forward", start=40, stop=50, step=2)]
    trace = trace_of((1, None, 40), (12, 22, 30), (24, 25, 20), (45, None, 64), spans=spans)
    found = predictions.phase_peaks(trace, replay(trace, None))
    assert found == {"forward": 104 * MIB, "backward": 70 * MIB}


def test_going_on_from_a_checkpoint_is_left_out():
    spans = [Span(name="step 1", start=1, stop=9), Span(name="resume", start=10, stop=20)]
    trace = trace_of((1, None, 40), (2, 12, 8), (11, 13, 500), spans=spans)
    cut = predictions.without_resuming(trace)
    assert [(a.born, a.died) for a in cut.allocations] == [(1, None), (2, None)]
    assert [span.name for span in cut.spans] == ["step 1"]
    assert cut.peak()[1] == 48 * MIB
    assert trace.peak()[1] == 548 * MIB  # untouched
