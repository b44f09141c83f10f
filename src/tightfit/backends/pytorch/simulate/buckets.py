"""The buckets of DistributedDataParallel, which its own code allocates out of sight of any trace."""

from __future__ import annotations

from tightfit.trace import Allocation, Category, Span, Trace


def with_buckets(trace: Trace, micro_batches: int) -> None:
    """Add to the trace of one device's step the buckets in which processes sum their gradients, as large as all of them
    and there from the first step to the last.

    A gradient moves into its bucket in the last micro-batch's backward pass, as soon as it is there. Those that earlier
    micro-batches sum lie beside the buckets until then. micro_batches: of a step, as the trace stands for.
    """
    update = next(span for span in trace.spans if span.name == "optimizer" and span.step == 2)
    gradients = [made for made in trace.allocations if made.category is Category.GRADIENTS]
    size = sum(made.bytes for made in gradients if _alive(made, update))
    if micro_batches == 1:
        for made in gradients:
            made.died = max(made.category_since, made.born + 1)
    end = max(span.stop for span in trace.spans if span.step)
    trace.allocations.append(Allocation(born=0, died=end, bytes=size, category=Category.GRADIENTS, category_since=0,
                                        op="DistributedDataParallel", shape=(size,), dtype="uint8"))


def _alive(made: Allocation, span: Span) -> bool:
    return made.born <= span.start and (made.died is None or made.died > span.start)
