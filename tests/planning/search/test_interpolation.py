"""Traces made from others equal the traces they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.toy import Toy
from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.planning.search.interpolation import align, interpolate, transfer
from tightfit.planning.search.splicing import with_micro_batches, with_optimizer, with_second
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS
from tightfit.trace import Allocation, Phase, UntracedMemory

GPU = Device(kind="cuda", name="toy", memory_bytes=1 << 34, capability=(8, 0))
TOY = Toy.drawn(7)
KINDS = [rung for kind in SLOTS["checkpointing"] for rung in kind.rungs()]


def traced(micro, count=2, batch=None, **fields):
    recipe = Recipe(micro_batch_size=micro, batch_size=batch or micro * count, **{"precision": "bf16", **fields})
    return TOY.predict(resolve(recipe, GPU), GPU)


def events(trace):
    return trace.ops, trace.allocations, trace.spans, trace.unseen


@pytest.mark.parametrize("at", [1, 3, 5, 9])
def test_interpolates_between_and_beyond(at):
    made = interpolate(traced(2), 2, traced(5), 5, at)
    assert events(made) == events(traced(at))


def test_interpolates_what_is_unseen():
    low, high = (replace(traced(m), unseen=[UntracedMemory(name="x", bytes=100 * m + 7, where="host", source="")])
                 for m in (2, 4))
    assert interpolate(low, 2, high, 4, 3).unseen[0].bytes == 307


def test_refuses_other_structures():
    assert interpolate(traced(2), 2, traced(4, checkpointing="every-block"), 4, 3) is None
    assert interpolate(traced(2), 2, traced(4, count=3), 4, 3) is not None  # equal micro-batches are there once
    assert interpolate(traced(2), 2, traced(4, count=1), 4, 3) is None
    assert interpolate(traced(2), 2, traced(2), 2, 3) is None


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_transfers_checkpointing_to_another_micro_batch(kind):
    fields = {"checkpointing": kind, "compile": "per-block"}
    made = transfer(traced(5, **fields), traced(5, compile="per-block"), traced(2, compile="per-block"))
    if getattr(kind, "keep", "") == "every-other-matmul" or kind.name == "memory-budget":
        assert made is None  # it keeps halves, of which the plain step has none
    else:
        assert events(made) == events(traced(2, **fields))


def test_transfers_roughly_what_is_fused_otherwise():
    plain_here, plain_there, there = traced(5), traced(2), traced(2, checkpointing="every-block")
    here = traced(5, checkpointing="every-block")
    for trace in (here, there):  # kernels of their own, with the traffic of two
        for op in trace.ops:
            if op.phase is Phase.FORWARD:
                op.name, op.bytes_read = f"fused {op.name}", 2 * op.bytes_read
    assert transfer(here, plain_here, plain_there) is None
    made = transfer(here, plain_here, plain_there, roughly=True)
    assert made.allocations == there.allocations
    assert [(op.name, op.shapes) for op in made.ops] == [(op.name, op.shapes) for op in there.ops]
    for ours, theirs in zip(made.ops, there.ops, strict=True):
        assert ours.bytes_read == pytest.approx(theirs.bytes_read, rel=0.02, abs=2)
        assert ours.flops == pytest.approx(theirs.flops, rel=0.02, abs=2)


def test_transfers_roughly_a_regions_scratch():
    def with_scratch(trace, *sizes):
        made = [Allocation(born=at, died=at + 1, bytes=size, op="compiled backward", shape=(size,), dtype="uint8")
                for at, size in enumerate(sizes, start=3)]
        return replace(trace, allocations=[*trace.allocations, *made])

    here, there = with_scratch(traced(5), 500 << 20), with_scratch(traced(2), 230 << 20)
    own = with_scratch(traced(5), 1000 << 20)
    assert transfer(own, here, there) is None
    assert transfer(own, here, there, roughly=True).allocations[-1].bytes == 460 << 20


def test_transfers_nothing_that_is_ambiguous():
    here, there = traced(5), traced(2)
    weight = there.allocations[0]
    grows = next(a for a in here.allocations if a.bytes != there.allocations[here.allocations.index(a)].bytes)
    twin = replace(grows, born=weight.born, died=weight.died, category_since=weight.category_since)
    same = replace(weight, op=grows.op, dtype=grows.dtype, shape=grows.shape, category=grows.category)
    assert transfer(here, here, there) is not None
    assert transfer(here, replace(here, allocations=[twin, *here.allocations[1:]]),
                    replace(there, allocations=[same, *there.allocations[1:]])) is None


def test_aligns_scratch_that_one_lacks():
    low, high = traced(2), traced(5)
    born = high.allocations[9].born
    for part in (*high.ops, *high.allocations):  # two ticks later from there on
        for name in ("tick", "born", "died", "category_since"):
            if (getattr(part, name, 0) or 0) > born:
                setattr(part, name, getattr(part, name) + 2)
    high.spans = [replace(s, start=s.start + 2 * (s.start > born), stop=s.stop + 2 * (s.stop > born))
                  for s in high.spans]
    scratch = Allocation(born=born + 1, died=born + 3, bytes=700, op="kernel", shape=(700,), dtype="uint8")
    high.allocations.insert(10, scratch)
    assert interpolate(low, 2, high, 5, 3) is None
    aligned_low, aligned_high = align(low, high)
    assert aligned_high == high
    assert aligned_low.allocations[10].bytes == 0
    assert aligned_low.peak()[1] == low.peak()[1]
    assert interpolate(aligned_low, 2, aligned_high, 5, 5) == high
    high.allocations[10] = replace(scratch, dtype="float32")
    assert align(low, high) is None


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("checkpointing", ["none", "every-block"])
def test_makes_windows_of_any_length(count, checkpointing):
    made = with_micro_batches(traced(3, checkpointing=checkpointing), count)
    truth = traced(3, count=count, checkpointing=checkpointing)
    assert alike(made, truth)
    assert list(made.curve()[1]) == list(truth.curve()[1])


def test_makes_a_window_whose_second_micro_batch_is_smaller():
    made = with_second(traced(5), traced(2))
    assert events(made) == events(traced(5, batch=7))


def test_makes_no_window_of_one_where_gradients_come_in_the_second():
    trace = traced(2)
    gradient = next(a for a in trace.allocations if a.category == "gradients" and a.born > trace.span("step 2").start)
    second = [s for s in trace.spans if s.name == "backward" and s.step == 2][-1]
    gradient.born = second.start + 1
    assert with_micro_batches(trace, 1) is None


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "lion", "adafactor"])
@pytest.mark.parametrize("checkpointing", ["none", "every-block"])
def test_puts_in_another_optimizer(optimizer, checkpointing):
    made = with_optimizer(traced(4, checkpointing=checkpointing), traced(2, optimizer=optimizer))
    truth = traced(4, checkpointing=checkpointing, optimizer=optimizer)
    assert alike(made, truth)
    for span in truth.spans:
        twin = next(s for s in made.spans if (s.name, s.start) == (span.name, span.start))
        assert made.peak(twin.start, twin.stop) == truth.peak(span.start, span.stop)


def test_puts_in_no_optimizer_without_its_spans():
    trace = traced(2)
    assert with_optimizer(replace(trace, spans=[]), trace) is None
    assert with_optimizer(trace, replace(trace, spans=[s for s in trace.spans if s.name != "save"])) is None


def alike(made, truth):
    """The same ops, as often, and the same memory."""
    def counted(trace):
        return [(op.name, op.shapes, op.flops, op.bytes_read, times) for op, times in trace.step_ops()]

    return counted(made) == counted(truth) and made.peak()[1] == truth.peak()[1]
