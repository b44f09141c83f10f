"""A combination at any micro-batch from two traces of it, against a trace of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.toy import Toy
from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.planning.search.lines import LONGER, Line, largest_block, optimizer_only, parameters, resident
from tightfit.recipe import Recipe
from tightfit.trace import Allocation, Op, OpClass, Phase, Trace

TOY = Toy.drawn(3)
DEVICE = Device(kind="cuda", name="toy", memory_bytes=1 << 40, capability=(8, 0))


def traced(micro, batch, **fields):
    fields = {"precision": "fp32", "optimizer": "adamw", **fields}
    recipe = Recipe.from_dict({"batch_size": batch, "micro_batch_size": micro, **fields})
    return TOY.predict(resolve(recipe, DEVICE), DEVICE)


def refused(micro):
    raise AssertionError(f"micro-batch {micro} was to be interpolated")


def line(low, high, trace_exactly=refused):
    return Line(low, 2, high, 11, {}, trace_exactly)


@pytest.mark.parametrize(("micro", "batch"), [(1, 16), (4, 16), (16, 16), (8, 20), (16, 20)])
def test_a_peak_is_that_of_its_own_trace(micro, batch):
    made, exact = line(traced(2, 4), traced(11, 22)), traced(micro, batch)
    beside = sum(figure.bytes for figure in exact.unseen if figure.where == "allocator")
    assert made.peak(micro, batch) == pytest.approx(exact.peak()[1] + beside, rel=1e-6)
    assert made.trace(micro, batch).peak()[1] == pytest.approx(exact.peak()[1], rel=1e-6)


def longer(trace, more):
    """The trace with so many ops more, so that it is not the same sequence of events."""
    extra = [Op("aten.add", 0, Phase.SETUP, OpClass.ELEMENTWISE) for _ in range(more)]
    return replace(trace, ops=[*extra, *trace.ops])


def test_what_differs_in_more_than_sizes_is_traced_itself():
    asked = []

    def exactly(micro):
        asked.append(micro)
        return traced(micro, 16)

    low, high = traced(2, 4), traced(11, 22)
    rigid = line(low, longer(high, 7), exactly)
    assert rigid.rigid
    assert rigid.trace(4, 16).peak() == traced(4, 16).peak()
    assert asked == [4]
    share = (low.peak()[1] + high.peak()[1]) / 2  # halfway: peaks are taken to be affine
    halfway = Line(low, 2, longer(high, 7), 10, {}, exactly).peak(6, 24)
    assert halfway == pytest.approx(share + (1 << 20), abs=2)


def test_a_micro_batch_whose_trace_would_be_far_too_long_is_out_of_reach():
    low, high = traced(2, 4), traced(11, 22)
    assert line(low, high).reaches(10**9)
    rigid = line(low, longer(high, 9 * 10))
    assert rigid.reaches(11)
    assert rigid.reaches(11 + LONGER // 11)
    assert not rigid.reaches(11 + LONGER)


def test_what_a_trace_says_of_a_model():
    trace = traced(2, 4)
    weights = TOY.blocks * TOY.weights
    assert parameters(trace) == weights
    assert largest_block(trace) == TOY.weights
    assert resident(trace) == (4 + 4 + 8) * weights


def test_an_optimizer_by_itself():
    only = optimizer_only(traced(2, 4))
    assert only is not None
    assert {op.phase for op in only.ops} == {Phase.OPTIMIZER}
    assert len(only.ops) == TOY.blocks
    assert only.allocations == []
    assert optimizer_only(Trace(origin="predicted", allocations=[Allocation(1, None, 5)])) is None
