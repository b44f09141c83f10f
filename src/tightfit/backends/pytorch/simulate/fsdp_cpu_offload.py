"""FSDP's parts in the host's memory, as `CPUOffloadPolicy` has them on a GPU: fake tensors are all the processor's.

A block's parts are copied to the device before they are gathered. Their gradients are copied back once they are summed;
where they add to earlier ones, the host waits for the copy and adds. Clipping and the optimizer's update are the
host's own work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tightfit.trace import MODEL_STATES, Allocation, Category, Op, OpClass, Phase, Place, Span, Stream, Trace
from tightfit.trace.events import NO_MODULE_RUNS

TO_DEVICE, TO_HOST = "fully_shard.to_device", "fully_shard.to_host"


def with_parts_on_host(trace: Trace, item: int) -> Trace:
    """The trace of a step with weights, gradients and optimizer states on the device, with these in the host's memory,
    and with their copies. item: bytes of a weight, and of its gradient."""
    updates = [span for span in trace.spans if span.name in NO_MODULE_RUNS]  # all work is on parts
    copies = list(_copies(trace, item))
    ops = sorted([*map(_where_it_runs, trace.ops), *copies], key=lambda op: op.tick)
    _wait(ops)
    allocations = [*_placed(trace, updates), *map(_passing, copies)]
    return replace(trace, ops=ops, allocations=allocations)


def _copies(trace: Trace, item: int) -> Iterator[Op]:
    """Copies of parts, each just before it is gathered, or just after it was summed."""
    for op in trace.ops:
        gathers, sums = "all_gather_copy_in" in op.name, "_reduce_scatter_base_" in op.name
        if gathers or sums:
            gathered = op.bytes_read // (2 if op.dtype in ("bfloat16", "float16") else 4)
            size = item * (gathered if gathers else op.shapes[0][0])
            yield Op(name=TO_DEVICE if gathers else TO_HOST, tick=op.tick + (-1 if gathers else 1), phase=op.phase,
                     op_class=OpClass.COMMUNICATION, module=op.module, bytes_read=size,
                     bytes_written=size, stream=Stream.COPY_IN if gathers else Stream.COPY_OUT,
                     after=() if gathers else (op.tick,))


def _where_it_runs(op: Op) -> Op:
    adds = op.stream is Stream.NETWORK and op.phase is Phase.BACKWARD and op.op_class is OpClass.ELEMENTWISE
    if adds or (op.phase is Phase.OPTIMIZER and op.stream is Stream.COMPUTE):
        return replace(op, stream=Stream.HOST)
    return op


def _wait(ops: list[Op]) -> None:
    """Let ops wait for the copies that they need: gathering for parts, which the last update left, and the host's work
    for gradients."""
    last: dict[Stream, int] = {}
    updated = max((op.tick for op in ops if op.phase is Phase.OPTIMIZER and op.stream is Stream.HOST), default=None)
    for op in ops:
        if op.name == TO_DEVICE and updated is not None and op.phase is Phase.FORWARD:
            op.after = (updated,)
        elif "all_gather_copy_in" in op.name:
            op.after = (*op.after, last[Stream.COPY_IN])
        elif op.stream is Stream.HOST and Stream.COPY_OUT in last:
            op.after = (*op.after, last.pop(Stream.COPY_OUT))
        last[op.stream] = op.tick


def _placed(trace: Trace, updates: list[Span]) -> Iterator[Allocation]:
    for made in trace.allocations:
        there = made.category in MODEL_STATES or any(span.start <= made.born < span.stop for span in updates)
        yield replace(made, place=Place.HOST, pinned=made.category is not Category.OPTIMIZER) if there else made


def _passing(copy: Op) -> Allocation:
    """A part on the device while it is copied."""
    return Allocation(born=copy.tick, died=copy.tick + 2, bytes=copy.bytes_read, module=copy.module, op=copy.name,
                      shape=(copy.bytes_read,), dtype="uint8")
