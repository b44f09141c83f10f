"""DeepSpeed's ZeRO as it is declared: its engine runs on no fake tensors.

Stages 1 and 2 begin with the trace of one device, of which optimizer states, and in stage 2 gradients, are divided;
stage 3 with that of FSDP, which divides and gathers the same. To either come what DeepSpeed's source says: a copy of a
process's part of the weights, which the optimizer updates, and its gradients in one piece while it does, or always
where they are offloaded; a bucket of gradients; in stage 2 a micro-batch's parts of gradients beside their sums.
Gradients are summed into parts, after every micro-batch from stage 2 on, and in stages 1 and 2 weights are gathered
after the update. What is offloaded lies in host memory, is copied over the link, and is updated by the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tightfit.backends.pytorch.simulate.ddp import buckets_of, is_alive
from tightfit.techniques.parallel import BUCKET_BYTES, Zero
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Place, Span, Stream, Trace

SUM, GATHER = "deepspeed.reduce_scatter", "deepspeed.all_gather"
WEIGHTS, GRADIENTS = "deepspeed.weights", "deepspeed.gradients"
TO_DEVICE, TO_HOST = "deepspeed.to_device", "deepspeed.to_host"
UPDATE_SPANS = ("optimizer", "resume")
"""Spans in which all work is done on parts."""
NOTE = "parallel: DeepSpeed's work is declared, from its source, and not traced: stage {stage} over a trace of {base}"
DRIVE_NOTE = "parallel.offload: times have what waits on the drive come and go at the speed of the host's link"


def with_zero(trace: Trace, technique: Zero, offloads: bool) -> Trace:
    """The trace of a process of ZeRO. trace: of the recipe that `Zero.of_one_process` gives. offloads: whether parts
    lie in a memory that is not the device's."""
    update = trace.spans_of("optimizer", 2)[0]
    weights = sum(made.bytes for made in trace.allocations if made.category is Category.WEIGHTS)
    part = weights
    if technique.stage < 3:
        part = -(-weights // technique.process_count)
        trace = _divided(trace, technique, update, part, offloads)
    end = max(span.stop for span in trace.spans if span.step)
    place = Place.HOST if offloads else Place.DEVICE

    def piece(born: int, died: int, op: str) -> Allocation:
        return Allocation(born=born, died=died, bytes=part, op=op, shape=(part,), dtype="uint8", place=place,
                          category=Category.OPTIMIZER if op == WEIGHTS else Category.GRADIENTS, category_since=born)

    made = [piece(0, end, WEIGHTS)]
    if technique.cpu_offloads:
        made += [piece(0, end, GRADIENTS) for _ in range(1 if technique.shards else 2)]
    else:
        made += [piece(span.start - 1, span.stop, GRADIENTS) for span in trace.spans if span.name == "optimizer"]
        passes = trace.spans_of("backward", 2)
        if technique.stage == 2 and (len(passes) > 1 or passes[0].times > 1):
            made += [piece(span.start, span.stop, GRADIENTS) for span in passes]
    notes = [*trace.notes, NOTE.format(stage=technique.stage, base="FSDP" if technique.shards else "one device")]
    trace = replace(trace, allocations=[*trace.allocations, *made], notes=notes)
    return _on_a_drive(trace) if technique.offload == "nvme" and offloads else trace


def _on_a_drive(trace: Trace) -> Trace:
    """The trace with the weights and states that wait in host memory on a drive; gradients are summed up there, and
    wait on the drive for the update."""
    moved = [replace(made, place=Place.DRIVE)
             if made.place is Place.HOST and made.category in (Category.WEIGHTS, Category.OPTIMIZER) else made
             for made in trace.allocations]
    summed = [replace(made, place=Place.DRIVE) for made in moved if made.place is Place.HOST and made.op == GRADIENTS]
    return replace(trace, allocations=[*moved, *summed], notes=[*trace.notes, DRIVE_NOTE])


def _divided(trace: Trace, technique: Zero, update: Span, part: int, offloads: bool) -> Trace:
    """Division of a step by stages 1 and 2, with their collectives. part: bytes of a process's part of the weights."""
    passes = trace.spans_of("backward", 2)
    summed = passes if technique.syncs_every else [max(passes, key=lambda span: span.stop)]
    added = [op for span in summed for op in _sums(trace, span, update, technique.process_count, offloads)]
    ops = [_share_of_update(op, technique.process_count, offloads) for op in trace.ops]
    if added:
        waits = next(op for op in ops if op.tick >= update.start and op.phase is Phase.OPTIMIZER)
        waits.after = (*waits.after, added[-1].tick)
    added += _gathered(ops, update, part, technique.process_count, offloads)
    allocations = [_share_of(made, technique, trace, offloads) for made in trace.allocations]
    allocations += [Allocation(born=span.start, died=span.stop, bytes=BUCKET_BYTES, op="deepspeed.bucket",
                               shape=(BUCKET_BYTES,), dtype="uint8")
                    for span in trace.spans if span.name == "backward"]  # fmt: skip
    return replace(trace, ops=sorted([*ops, *added], key=lambda op: op.tick), allocations=allocations)


def _share_of(made: Allocation, technique: Zero, trace: Trace, offloads: bool) -> Allocation:
    divided = made.category is Category.OPTIMIZER or (made.category is Category.GRADIENTS and technique.stage == 2)
    divided |= any(span.name in UPDATE_SPANS and span.start <= made.born < span.stop for span in trace.spans)
    if not divided:
        return made
    place = Place.HOST if offloads else made.place
    return replace(made, bytes=-(-made.bytes // technique.process_count), place=place)


def _share_of_update(op: Op, processes: int, offloads: bool) -> Op:
    if op.phase is not Phase.OPTIMIZER:
        return op
    return replace(op, bytes_read=op.bytes_read // processes, bytes_written=op.bytes_written // processes,
                   flops=op.flops // processes, stream=Stream.HOST if offloads else op.stream)  # fmt: skip


def _sums(trace: Trace, span: Span, update: Span, processes: int, offloads: bool) -> Iterator[Op]:
    """The ops of a backward pass that sum buckets of gradients into parts, and bring those to the host."""
    gradients = [made for made in trace.allocations
                 if made.category is Category.GRADIENTS and is_alive(made, update)]  # fmt: skip
    for bucket in buckets_of(trace, span, gradients):
        tick, sent = bucket.moment + 1, bucket.bytes * (processes - 1) // processes
        yield _moves(SUM, tick, Phase.BACKWARD, sent, bucket.bytes, Stream.NETWORK, bucket.moment)
        if offloads:
            size = bucket.bytes // processes
            yield _moves(TO_HOST, tick + 1, Phase.BACKWARD, size, size, Stream.COPY_OUT, tick)


def _gathered(ops: list[Op], update: Span, part: int, processes: int, offloads: bool) -> Iterator[Op]:
    """The ops that bring updated parts back to the device, and to every process."""
    tick = max(op.tick for op in ops if op.phase is Phase.OPTIMIZER and op.tick < update.stop)
    if offloads:
        yield _moves(TO_DEVICE, tick + 1, Phase.OPTIMIZER, part, part, Stream.COPY_IN, tick)
        tick += 1
    yield _moves(GATHER, tick + 1, Phase.OPTIMIZER, (processes - 1) * part, processes * part, Stream.NETWORK, tick)


def _moves(name: str, tick: int, phase: Phase, size: int, whole: int, stream: Stream, after: int) -> Op:
    return Op(name=name, tick=tick, phase=phase, op_class=OpClass.COMMUNICATION, shapes=((whole,),), dtype="float32",
              bytes_read=size, bytes_written=size, stream=stream, after=(after,))  # fmt: skip
