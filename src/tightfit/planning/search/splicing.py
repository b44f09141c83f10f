"""A step's trace put together from parts of others: fewer or more micro-batches, another optimizer."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from tightfit.planning.search.interpolation import OF_STATES
from tightfit.trace import Allocation, Category, Op, Span, Trace


def micro_batches(trace: Trace) -> list[list[Span]]:
    """The last step's spans by micro-batch, each a forward and a backward pass, in order of time."""
    step = trace.last_step()
    found: list[list[Span]] = []
    for span in sorted(trace.spans, key=lambda s: s.start):
        if step is None or span.step != step.step:
            continue
        if span.name in ("forward", "micro-batch"):
            found.append([span])
        elif span.name == "backward" and found:
            found[-1].append(span)
    return found


def with_micro_batches(trace: Trace, count: int) -> Trace | None:
    """The trace of a window of two micro-batches as that of a window of `count` equal ones.

    The first finds no gradients, the others add to them, all alike: the second one stands for them. None where the
    last step does not hold two micro-batches, or where the gradients are made in the second.
    """
    groups = micro_batches(trace)
    if len(groups) != 2:
        return None
    second = groups[1]
    if count >= 2:
        spans = [replace(s, times=count - 1) if s in second else s for s in trace.spans]
        return replace(trace, spans=spans)
    start, stop = second[0].start, second[-1].stop
    inside = [a for a in trace.allocations if start <= a.born < stop]
    if any(a.category is Category.GRADIENTS and (a.died is None or a.died > stop) for a in inside):
        return None
    return replace(
        trace,
        ops=[op for op in trace.ops if not start <= op.tick < stop],
        allocations=[a for a in trace.allocations if not start <= a.born < stop],
        spans=[s for s in trace.spans if s not in second],
    )


def with_second(trace: Trace, other: Trace) -> Trace | None:
    """The trace of a window of two micro-batches with the second one of `other`, which is the same sequence of events
    at another size. None where the last step does not hold two."""
    groups = micro_batches(trace)
    if len(groups) != 2:
        return None
    start, stop = groups[1][0].start, groups[1][-1].stop
    return replace(
        trace,
        ops=[b if start <= a.tick < stop else a for a, b in zip(trace.ops, other.ops, strict=True)],
        allocations=[
            b if start <= a.born < stop else a for a, b in zip(trace.allocations, other.allocations, strict=True)
        ],
    )


def with_optimizer(trace: Trace, donor: Trace) -> Trace | None:
    """The trace's forward and backward passes with the donor's optimizer, of the same model.

    What lies in the donor's optimizer steps, its saving and its resuming, and every optimizer state, comes from the
    donor; all else from the trace. What the one frees inside the other's part lives to that part's end. None where the
    two do not have the same such spans.
    """
    mine, theirs = _states(trace), _states(donor)
    if not mine or [(s.name, s.step) for s in mine] != [(s.name, s.step) for s in theirs]:
        return None
    own, other = _Clock(mine), _Clock(theirs)
    lengths = [(other if inside else own).length(number) for number, inside in enumerate(own.inside_of)]
    starts = list(accumulate(lengths[:-1], initial=0))
    own.starts = other.starts = starts
    allocations = [
        _moved(a, own.at(a.born), own.at(a.category_since), own.end(a.died))
        for a in trace.allocations
        if a.category is not Category.OPTIMIZER and not own.inside(a.born)
    ]
    allocations += [
        _moved(a, other.at(a.born), other.at(a.category_since), None if a.died is None else other.at(a.died))
        for a in donor.allocations
        if a.category is Category.OPTIMIZER or other.inside(a.born)
    ]
    ops = [_at(op, own.at(op.tick)) for op in trace.ops if not own.inside(op.tick)]
    ops += [_at(op, other.at(op.tick)) for op in donor.ops if other.inside(op.tick)]
    return replace(
        trace,
        ops=sorted(ops, key=lambda op: op.tick),
        allocations=sorted(allocations, key=lambda a: a.born),
        spans=[replace(s, start=own.at(s.start), stop=own.at(s.stop)) for s in trace.spans],
        notes=list(dict.fromkeys([*trace.notes, *donor.notes])),
    )


def _moved(a: Allocation, born: int, became: int, died: int | None) -> Allocation:
    """The allocation at other ticks; written out, for `replace` takes most of a large trace's time."""
    return Allocation(born, died, a.bytes, a.category, became, a.module, a.op, a.shape, a.dtype)


def _at(op: Op, tick: int) -> Op:
    """The op at another tick, written out alike."""
    return Op(
        op.name, tick, op.phase, op.op_class, op.module, op.shapes, op.dtype, op.flops, op.bytes_read,
        op.bytes_written, op.kernels, op.seconds,
    )


def _states(trace: Trace) -> list[Span]:
    return sorted((s for s in trace.spans if s.name in OF_STATES), key=lambda s: s.start)


class _Clock:
    """From a trace's ticks to those of the one spliced from it.

    A trace is cut into stretches: before its first span of states, that span, what lies between it and the next, and
    so on. `starts` says where each stretch begins in the new trace.
    """

    def __init__(self, spans: list[Span]) -> None:
        self.cuts = [0, *(tick for span in spans for tick in (span.start, span.stop))]
        self.inside_of = [number % 2 == 1 for number in range(len(self.cuts))]
        self.starts: list[int] = []

    def length(self, number: int) -> int:
        """Ticks in a stretch; of the last, which has no end, 0."""
        return self.cuts[number + 1] - self.cuts[number] if number + 1 < len(self.cuts) else 0

    def number(self, tick: int) -> int:
        return bisect_right(self.cuts, tick) - 1

    def inside(self, tick: int) -> bool:
        """Whether it lies in a span of states."""
        return self.inside_of[self.number(tick)]

    def at(self, tick: int) -> int:
        """The new tick, at most the end of the new stretch."""
        number = self.number(tick)
        new = self.starts[number] + tick - self.cuts[number]
        return new if number + 1 == len(self.cuts) else min(new, self.starts[number + 1])

    def end(self, tick: int | None) -> int | None:
        """The new tick of a release; of one inside a span of states, that span's end."""
        if tick is None:
            return None
        number = self.number(tick)
        return self.starts[number + 1] if self.inside_of[number] else self.at(tick)
