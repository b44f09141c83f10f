"""The buckets of DistributedDataParallel, which its own code fills and exchanges out of sight of any trace.

It puts gradients into buckets in the order in which a backward pass makes them, and sums a bucket over processes as
soon as it is full, while the backward pass goes on (Li et al. 2020, arXiv 2006.15704).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tightfit.techniques.parallel import BUCKET_BYTES
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Span, Stream, Trace

FIRST_BUCKET_BYTES = 1 << 20
"""Bytes of the first bucket: torch's default. A gradient goes whole into one."""
COPY, SUM = "DistributedDataParallel.copy", "DistributedDataParallel.all_reduce"


@dataclass
class Bucket:
    """Gradients that are summed at once, in the order in which they are there. moment: the tick at which the last one
    is."""

    moment: int = 0
    gradients: list[Allocation] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(made.bytes for made in self.gradients)


def with_buckets(trace: Trace, processes: int) -> Trace:
    """The trace of one device's step with the buckets in which processes sum their gradients, as large as all of them
    and there from the first step to the last, and with their exchange in the step's last backward pass.

    A gradient moves into its bucket in the last micro-batch's backward pass, as soon as it is there. Those that earlier
    micro-batches sum lie beside the buckets until then.
    """
    update = trace.spans_of("optimizer", 2)[0]
    passes = trace.spans_of("backward", 2)
    gradients = [made for made in trace.allocations if made.category is Category.GRADIENTS]
    exchanged = [made for made in gradients if is_alive(made, update)]
    last = max(passes, key=lambda span: span.stop)
    added = list(_exchange(list(buckets_of(trace, last, exchanged)), processes))
    if added:
        first = next(op for op in trace.ops if op.tick >= update.start and op.stream is Stream.COMPUTE)
        first.after = (*first.after, added[-1].tick)
    if len(passes) == 1 and passes[0].times == 1:
        for made in gradients:
            made.died = max(made.category_since, made.born + 1)
    size = sum(made.bytes for made in exchanged)
    end = max(span.stop for span in trace.spans if span.step)
    trace.allocations.append(Allocation(born=0, died=end, bytes=size, category=Category.GRADIENTS, category_since=0,
                                        op="DistributedDataParallel", shape=(size,), dtype="uint8"))
    return replace(trace, ops=sorted([*trace.ops, *added], key=lambda op: op.tick))


def is_alive(made: Allocation, span: Span) -> bool:
    """Whether it is there when a span begins."""
    return made.born <= span.start and (made.died is None or made.died > span.start)


def buckets_of(trace: Trace, last: Span, gradients: Sequence[Allocation]) -> Iterator[Bucket]:
    """The buckets, in the order in which they are full."""
    ends = {op.module: op.tick for op in trace.ops
            if last.start <= op.tick < last.stop and op.phase is Phase.BACKWARD}
    moments = [(_moment(made.module, ends), number) for number, made in enumerate(gradients)]
    bucket, limit = Bucket(), FIRST_BUCKET_BYTES
    for moment, number in sorted(moments):
        made = gradients[number]
        if bucket.gradients and bucket.gradients[0].dtype != made.dtype:
            yield bucket
            bucket = Bucket()
        bucket.gradients.append(made)
        bucket.moment = moment or last.stop - 1
        if bucket.bytes >= limit:
            yield bucket
            bucket, limit = Bucket(), BUCKET_BYTES
    if bucket.gradients:
        yield bucket


def _moment(module: str, ends: dict[str, int]) -> int:
    """The tick of a module's last op, or of the module's that it runs in; 0 for none."""
    while module and module not in ends:
        module = module.rpartition(".")[0]
    return ends.get(module, 0)


def _exchange(buckets: Sequence[Bucket], processes: int) -> Iterator[Op]:
    """The ops that fill the buckets and sum them over processes in a ring."""
    for bucket in buckets:
        made, size = bucket.gradients[0], bucket.bytes
        sent = 2 * size * (processes - 1) // processes
        tick = bucket.moment + 1
        yield Op(name=COPY, tick=tick, phase=Phase.BACKWARD, op_class=OpClass.MOVEMENT, module=made.module,
                 shapes=((size,),), dtype=made.dtype, bytes_read=size, bytes_written=size,
                 kernels=len(bucket.gradients))
        yield Op(name=SUM, tick=tick + 1, phase=Phase.BACKWARD, op_class=OpClass.COMMUNICATION, module=made.module,
                 shapes=((size,),), dtype=made.dtype, bytes_read=sent, bytes_written=sent, stream=Stream.NETWORK,
                 after=(tick,))
