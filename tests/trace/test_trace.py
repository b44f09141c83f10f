"""Traces: what is alive when, by category, and how often a step's ops run."""

from __future__ import annotations

import pytest

from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Span, Trace


@pytest.fixture
def trace() -> Trace:
    """Weights of 100, activations of 40 from tick 3 to 9, a gradient that becomes one at tick 7."""
    return Trace(
        origin="predicted",
        allocations=[
            Allocation(born=1, died=None, bytes=100, category=Category.WEIGHTS, category_since=1),
            Allocation(born=3, died=9, bytes=40, category=Category.ACTIVATIONS, category_since=3),
            Allocation(born=6, died=12, bytes=30, category=Category.GRADIENTS, category_since=7),
        ],
        spans=[
            Span(name="step 1", start=2, stop=13, step=1),
            Span(name="forward", start=2, stop=5, step=1),
            Span(name="backward", start=5, stop=13, step=1, times=3),
        ],
        ops=[
            Op(name="a", tick=3, phase=Phase.FORWARD, op_class=OpClass.OTHER),
            Op(name="b", tick=6, phase=Phase.BACKWARD, op_class=OpClass.OTHER),
        ],
    )


def test_the_peak_is_the_largest_sum_of_what_is_alive(trace):
    assert trace.peak() == (6, 170)


def test_a_peak_in_a_stretch_counts_what_was_alive_before(trace):
    assert trace.peak(2, 5) == (3, 140)
    assert trace.peak(10, 12) == (10, 130)
    assert trace.peak(12, 13) == (12, 100)


def test_nothing_is_alive_before_the_first_birth(trace):
    assert trace.peak(0, 1) == (0, 0)


def test_memory_counts_as_its_category_from_the_tick_it_became_it(trace):
    assert trace.by_category(6)[Category.TEMPORARY] == 30
    assert trace.by_category(6)[Category.GRADIENTS] == 0
    assert trace.by_category(7)[Category.GRADIENTS] == 30
    assert sum(trace.by_category(6).values()) == trace.peak()[1]


def test_ops_run_as_often_as_their_span(trace):
    assert [(op.name, times) for op, times in trace.step_ops()] == [("a", 1), ("b", 3)]


def test_a_trace_of_nothing_has_no_peak():
    assert Trace(origin="predicted").peak() == (0, 0)
    assert list(Trace(origin="predicted").step_ops()) == []


def test_an_unknown_span_is_a_key_error(trace):
    with pytest.raises(KeyError):
        trace.span("evaluation")
