"""A step's trace at another micro-batch, without tracing the step again.

A step's bytes and FLOPs are affine in the micro-batch: weights, their gradients and their states do not depend on it,
everything else grows with its samples. So two traces of one step give it at any micro-batch, event by event. What a
search chooses in the end is traced itself; these figures only say what is worth that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from tightfit.trace import Allocation, Category, Op, Trace

T = TypeVar("T")

SMALL = 1 << 16
"""Bytes of an event that is taken to be the same at every micro-batch where nothing says how it grows."""

OF_STATES = frozenset({"optimizer", "save", "resume"})
"""Spans of the optimizer's own work, which no micro-batch changes."""

Shape = tuple[int, ...]


def interpolate(
    low: Trace, at_low: int, high: Trace, at_high: int, at: int, *, compared: bool = False
) -> Trace | None:
    """The step at a micro-batch of `at` samples, from its traces at `at_low` and at `at_high` samples.

    compared: whether the two are known to have the same structure.
    Bytes, FLOPs and shapes are affine, rounded to integers; ticks, spans and notes are those of `low`. What does not
    change is shared with `low`. None where the two are not one sequence of events.
    """
    if at_low == at_high or not (compared or same_structure(low, high)):
        return None
    if at in (at_low, at_high):
        return low if at == at_low else high
    line = _Affine(at - at_low, at_high - at_low)
    return Trace(
        origin=low.origin,
        ops=[line.op(a, b) for a, b in zip(low.ops, high.ops, strict=True)],
        allocations=[line.allocation(a, b) for a, b in zip(low.allocations, high.allocations, strict=True)],
        spans=list(low.spans),
        unseen=[replace(a, bytes=line(a.bytes, b.bytes)) for a, b in zip(low.unseen, high.unseen, strict=True)],
        notes=list(low.notes),
    )


def same_structure(low: Trace, high: Trace) -> bool:
    """Whether two traces are one sequence of events that differ in sizes alone."""
    return (
        _alike(low.spans, high.spans, lambda s: (s.name, s.start, s.stop, s.step))
        and _alike(low.unseen, high.unseen, lambda u: (u.name, u.where))
        and _alike(low.ops, high.ops, lambda o: (o.tick, o.name, o.kernels, tuple(map(len, o.shapes))))
        and _alike(low.allocations, high.allocations,
                   lambda a: (a.born, a.died, a.category, a.category_since, a.op, len(a.shape)))
    )


def align(low: Trace, high: Trace) -> tuple[Trace, Trace] | None:
    """Two traces of one step as one sequence of events, where kernels ask for scratch at one micro-batch only.

    Scratch that one of them lacks is there with 0 bytes; ticks and spans are those of the one with more allocations,
    and scratch that only the other has is left out. None where they differ in anything else.
    """
    if same_structure(low, high):
        return low, high
    base, other = (low, high) if len(low.allocations) > len(high.allocations) else (high, low)
    same = (
        _alike(base.ops, other.ops, lambda o: (o.name, o.kernels, tuple(map(len, o.shapes))))
        and _alike(base.spans, other.spans, lambda s: (s.name, s.step))
        and _alike(base.unseen, other.unseen, lambda u: (u.name, u.where))
    )
    matched = _match(base.allocations, other.allocations) if same else None
    if matched is None:
        return None
    moved = replace(
        other,
        ops=[replace(b, tick=a.tick) for a, b in zip(base.ops, other.ops, strict=True)],
        allocations=[
            replace(a, bytes=0) if b is None else replace(b, born=a.born, died=a.died, category_since=a.category_since)
            for a, b in zip(base.allocations, matched, strict=True)
        ],
        spans=[replace(b, start=a.start, stop=a.stop) for a, b in zip(base.spans, other.spans, strict=True)],
    )
    return (base, moved) if base is low else (moved, base)


def _match(base: Sequence[Allocation], other: Sequence[Allocation]) -> list[Allocation | None] | None:
    """For each of `base` its like in `other`, in order; None for scratch without one, and for all where more differs.
    """
    found: list[Allocation | None] = []
    at = 0
    for allocation in base:
        while at < len(other) and not _same_kind(allocation, other[at]) and _is_scratch(other[at]):
            at += 1
        if at < len(other) and _same_kind(allocation, other[at]):
            found.append(other[at])
            at += 1
        elif _is_scratch(allocation):
            found.append(None)
        else:
            return None
    return found if all(map(_is_scratch, other[at:])) else None


def _same_kind(one: Allocation, other: Allocation) -> bool:
    return (one.op, one.dtype, one.category, len(one.shape)) == (other.op, other.dtype, other.category,
                                                                 len(other.shape))


def _is_scratch(allocation: Allocation) -> bool:
    """Whether it is a kernel's own passing memory, gone when the op is done: bytes, in one dimension."""
    return allocation.dtype == "uint8" and len(allocation.shape) == 1 and allocation.category is Category.TEMPORARY


def transfer(trace: Trace, here: Trace, there: Trace, *, roughly: bool = False) -> Trace | None:
    """`trace` as it would be at another micro-batch, which a relative of it was traced at.

    here, there: the relative, which runs the same ops as `trace` though not in the same order or number (such as the
        step without checkpointing), at the micro-batch of `trace` and at the other one.
    roughly: scale an event that has no like, as compiled steps have where other ops are fused: by what became of its
        shape, or of its region's scratch, in the relative.
    Each event becomes what the relative's event of the same op and sizes became. None where `here` and `there` are
    not one sequence, where equal events of the relative become different ones, or where a large event has no like.
    """
    if not same_structure(here, there):
        return None
    ops = _mapping((_op_key(a), _op_sizes(b)) for a, b in zip(here.ops, there.ops, strict=True))
    memory = _mapping(
        (_allocation_key(a), (b.shape, b.bytes)) for a, b in zip(here.allocations, there.allocations, strict=True)
    )
    if ops is None or memory is None:
        return None
    fixed = [(span.start, span.stop) for span in trace.spans if span.name in OF_STATES]

    def kept(tick: int, size: int) -> bool:
        """Whether an event without a like stays as it is: a small one, or one of the optimizer's."""
        return size <= SMALL or any(start <= tick < stop for start, stop in fixed)

    scaled = _Scaled(here, there) if roughly else None
    new_ops: list[Op] = []
    for op in trace.ops:
        known = ops.get(_op_key(op)) or (None if scaled is None else scaled.op(op))
        if known is None and not kept(op.tick, op.bytes_read + op.bytes_written):
            return None
        new_ops.append(op if known is None else _resized_op(op, *known))
    new_allocations: list[Allocation] = []
    for allocation in trace.allocations:
        sizes = memory.get(_allocation_key(allocation)) or (None if scaled is None else scaled.allocation(allocation))
        if sizes is None and not kept(allocation.born, allocation.bytes):
            return None
        new_allocations.append(allocation if sizes is None else _resized(allocation, *sizes))
    unseen = list(trace.unseen)
    if _alike(trace.unseen, here.unseen, lambda u: (u.name, u.where, u.bytes)):
        unseen = list(there.unseen)
    return Trace(origin=trace.origin, ops=new_ops, allocations=new_allocations, spans=list(trace.spans), unseen=unseen,
                 notes=list(trace.notes))


class _Scaled:
    """What events become by their shapes alone: as the relative's ops of the same shapes did together, else as each
    shape by itself; scratch as its region's."""

    def __init__(self, here: Trace, there: Trace) -> None:
        self._shapes: dict[Shape, Shape | None] = {}
        self._totals: dict[Hashable, tuple[int, int]] = {}
        for a, b in zip(here.ops, there.ops, strict=True):
            self._count(a.shapes, _moved(a), _moved(b))
            for one, other in zip(a.shapes, b.shapes, strict=True):
                self._learn(one, other)
        for old, new in zip(here.allocations, there.allocations, strict=True):
            if _is_scratch(old):
                self._count(old.op, old.bytes, new.bytes)
            else:
                self._learn(old.shape, new.shape)

    def op(self, op: Op) -> tuple[tuple[Shape, ...], int, int, int] | None:
        shapes = tuple(shape for shape in map(self._shapes.get, op.shapes) if shape is not None)
        if not shapes or len(shapes) < len(op.shapes):
            return None
        before, after = self._totals.get(op.shapes, (sum(map(math.prod, op.shapes)), sum(map(math.prod, shapes))))
        flops, read, written = (size * after // max(before, 1) for size in (op.flops, op.bytes_read, op.bytes_written))
        return shapes, flops, read, written

    def allocation(self, allocation: Allocation) -> tuple[Shape, int] | None:
        if _is_scratch(allocation):
            before, after = self._totals.get(allocation.op, (0, 0))
            size = allocation.bytes * after // max(before, 1)
            return ((size,), size) if before else None
        shape = self._shapes.get(allocation.shape)
        if shape is None:
            return None
        return shape, allocation.bytes * math.prod(shape) // max(math.prod(allocation.shape), 1)

    def _learn(self, one: Shape, other: Shape) -> None:
        """Shapes that become different ones are left out."""
        if self._shapes.setdefault(one, other) != other:
            self._shapes[one] = None

    def _count(self, likeness: Hashable, old: int, new: int) -> None:
        before, after = self._totals.get(likeness, (0, 0))
        self._totals[likeness] = before + old, after + new


def _moved(op: Op) -> int:
    return op.bytes_read + op.bytes_written


class _Affine:
    """Values on the line through two points, `share` of `whole` of the way from the first to the second."""

    def __init__(self, share: int, whole: int) -> None:
        self.share, self.whole = share, whole
        self._shapes: dict[tuple[tuple[Shape, ...], tuple[Shape, ...]], tuple[Shape, ...]] = {}

    def __call__(self, low: int, high: int) -> int:
        step = (high - low) * self.share
        return max(low + (2 * step + self.whole) // (2 * self.whole), 0)

    def shapes(self, low: tuple[Shape, ...], high: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """Each shape in between; a step has few different ones."""
        found = self._shapes.get((low, high))
        if found is None:
            found = tuple(tuple(map(self, a, b)) for a, b in zip(low, high, strict=True))
            self._shapes[low, high] = found
        return found

    def op(self, low: Op, high: Op) -> Op:
        if low.shapes == high.shapes and _op_sizes(low) == _op_sizes(high):
            return low
        return _resized_op(
            low, self.shapes(low.shapes, high.shapes), self(low.flops, high.flops),
            self(low.bytes_read, high.bytes_read), self(low.bytes_written, high.bytes_written),
        )

    def allocation(self, low: Allocation, high: Allocation) -> Allocation:
        if low.bytes == high.bytes and low.shape == high.shape:
            return low
        return _resized(low, self.shapes((low.shape,), (high.shape,))[0], self(low.bytes, high.bytes))


def _resized_op(op: Op, shapes: tuple[Shape, ...], flops: int, bytes_read: int, bytes_written: int) -> Op:
    return Op(op.name, op.tick, op.phase, op.op_class, op.module, shapes, op.dtype, flops, bytes_read, bytes_written,
              op.kernels, op.seconds)


def _resized(a: Allocation, shape: Shape, size: int) -> Allocation:
    return Allocation(a.born, a.died, size, a.category, a.category_since, a.module, a.op, shape, a.dtype)


def _op_key(op: Op) -> Hashable:
    return op.name, op.dtype, op.shapes, op.flops, op.bytes_read, op.bytes_written


def _op_sizes(op: Op) -> tuple[tuple[Shape, ...], int, int, int]:
    return op.shapes, op.flops, op.bytes_read, op.bytes_written


def _allocation_key(allocation: Allocation) -> Hashable:
    return allocation.op, allocation.dtype, allocation.shape, allocation.bytes


def _alike(some: Sequence[T], others: Sequence[T], key: Callable[[T], Hashable]) -> bool:
    return len(some) == len(others) and all(key(a) == key(b) for a, b in zip(some, others, strict=True))


def _mapping(pairs: Iterable[tuple[Hashable, T]]) -> dict[Hashable, T] | None:
    """The pairs as a dict; None where one key has two values."""
    found: dict[Hashable, T] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            return None
    return found
