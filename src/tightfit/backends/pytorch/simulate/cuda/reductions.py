"""Memory that a reduction on CUDA takes while it runs: partial results of the blocks of threads that share an output.

Where few outputs are each the sum of many numbers, as in the gradient of a bias or of a normalization's weight, several
blocks of threads work on one output, and leave what they have in a buffer. It is sized for more than they leave: about
128 bytes for each thread of the device for each output that a block takes, some 100 MiB on a large GPU.

Read from aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, global_memory_size) and TensorIterator.cpp
(reorder_dimensions, coalesce_dimensions); the same in torch 2.11 and 2.13. Not yet measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.devices import Device

THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Threads that a streaming multiprocessor holds at once, by compute capability; 2048 on the others (CUDA C++
Programming Guide, technical specifications per compute capability)."""

BLOCK, WARP, VECTOR = 512, 32, 4
LEAST, MOST = 16, 256
"""Values that a thread of a shared output sums: at least and at most."""
INDEXABLE = 2**31 - 1
"""Bytes that a kernel's 32-bit offsets reach; what is larger is reduced in parts."""


class Dim(NamedTuple):
    """A dimension of a reduction; strides in elements, that of the result 0 where it is reduced."""

    size: int
    out: int
    stride: int


@dataclass(frozen=True)
class Reduced:
    """A reduction: see `reduction_buffer`."""

    dims: tuple[Dim, ...]
    itemsize: int
    offset: int
    accumulator: int
    vector: int


def reduction_buffer(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, over: Iterable[int] | None, device: Device, *,
    offset: int = 0, accumulator: int = 4, vector: int = VECTOR,
) -> int:  # fmt: skip
    """Bytes for reducing an array over some of its dimensions; None or none of them means all.

    strides: in elements. itemsize: bytes of an element. offset: where it begins in its memory, in elements.
    accumulator: bytes of a partial result, such as 4 for a sum in fp32. vector: elements that a thread loads at once.
    Gives 0 where the number of the device's multiprocessors is not known.
    """
    rank = len(shape)
    if not device.units or not math.prod(shape):
        return 0
    reduced = {dim % rank for dim in over or ()} if rank else set()
    reduced = reduced or set(range(rank))
    out, step = [0] * rank, 1
    for dim in reversed(range(rank)):
        if dim not in reduced:
            out[dim], step = step, step * shape[dim]
    dims = _ordered([Dim(shape[d], out[d], strides[d]) for d in range(rank)])
    return _buffer(Reduced(dims, itemsize, offset, accumulator, vector), device)


def _ordered(dims: list[Dim]) -> tuple[Dim, ...]:
    """Reduced dimensions first, then the fastest moving; neighbours that are one piece in memory become one."""
    order = list(reversed(dims))
    for at in range(1, len(order)):
        moving = at
        for before in reversed(range(at)):
            verdict = _comes_after(order[before], order[moving])
            if verdict < 0:
                break
            if verdict > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
    merged: list[Dim] = []
    for dim in order:
        last = merged[-1] if merged else None
        behind = last and (last.size * last.out, last.size * last.stride)  # where one piece would go on
        if last is not None and (1 in (last.size, dim.size) or behind == (dim.out, dim.stride)):
            first = dim if last.size == 1 else last
            merged[-1] = first._replace(size=last.size * dim.size)
        else:
            merged.append(dim)
    return tuple(merged)


def _comes_after(first: Dim, second: Dim) -> int:
    """1 where `first` belongs behind `second`, -1 where before it, 0 where neither is said."""
    if (first.out == 0) != (second.out == 0):
        return 1 if second.out == 0 else -1
    for one, other in ((first.out, second.out), (first.stride, second.stride)):
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if first.size > second.size:
            return 1
    return 0


def _buffer(what: Reduced, device: Device) -> int:
    extents = [(dim.size - 1) * max(dim.stride * what.itemsize, dim.out * what.accumulator) for dim in what.dims]
    reach = sum((dim.size - 1) * dim.stride * what.itemsize for dim in what.dims)
    if reach >= INDEXABLE and max(extents) > 0:  # one part after another, of which the first is no smaller
        at = extents.index(max(extents))
        dims = tuple(d._replace(size=d.size - d.size // 2) if n == at else d for n, d in enumerate(what.dims))
        return _buffer(Reduced(dims, what.itemsize, what.offset, what.accumulator, what.vector), device)
    return _configured(what, device)


def _configured(what: Reduced, device: Device) -> int:
    reduced = [dim for dim in what.dims if dim.out == 0]
    kept = [dim for dim in what.dims if dim.out != 0]
    inputs, outputs = math.prod(d.size for d in reduced), math.prod(d.size for d in kept)
    along = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    fastest = (reduced if along else kept)[0].stride if what.dims else 1
    width, height, vector = (inputs, outputs, 1) if along else (outputs, inputs, 1)
    if fastest == 1 and along and width >= 128 and len(reduced) == 1:
        width //= what.vector
    elif fastest == 1 and not along:
        vector = _output_vector(what, kept)
        width //= vector
    most = BLOCK // vector
    wide, high = min(_power(width), most), min(_power(height), most)
    columns = min(wide, WARP)
    rows = min(high, most // columns)
    columns = min(wide, most // rows)
    per_step = columns if along else 1
    values = -(-inputs // per_step)
    if values < min(rows * LEAST, MOST):
        return 0  # a block has all of an output's numbers
    values = -(-inputs // (per_step * rows))
    blocks = -(-(outputs // vector) // (1 if along else columns))
    wanted = device.units * (THREADS.get(device.capability or (0, 0), 2048) // (columns * rows))
    if values < MOST or blocks > wanted:
        return 0
    shared = max(min(-(-wanted // blocks), -(-values // LEAST)), -(-values // MOST))
    if shared <= 1:
        return 0
    return what.accumulator * outputs * shared * (1 if along else columns * vector) + 4 * blocks


def _output_vector(what: Reduced, kept: list[Dim]) -> int:
    """Outputs that a thread takes at once: as many as every row begins at a multiple of."""
    vector = VECTOR
    others = [dim.stride for dim in what.dims if dim is not kept[0]]
    for number in (what.offset, kept[0].size, *others):
        while number % vector:
            vector //= 2
    return vector


def _power(number: int) -> int:
    """The largest power of two that is no more than the number."""
    return 1 << max(number, 1).bit_length() - 1
