"""A trace of a training step, predicted or measured: its ops, its allocations, and the spans of time they lie in.

Time is counted in ticks: every op, allocation and release has one of its own. Bytes are what was asked for, before any
allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

Tick = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Seconds = Annotated[float, Field(ge=0, le=float(1 << 62))]
"""Bounds that hold of a trace that is read from a file."""
FUSED_PREFIX = "fused "
"""Prefix of the names of a compiled region's kernels."""
PAGEABLE = ".pageable"
"""Suffix of the name of a copy to or from host memory that is not page-locked: the host waits for it."""


class Category(StrEnum):
    """The use of a piece of memory, what stays the longest first.

    Activations are what is kept for the backward pass, logits included; a gradient counts as one once it is a
    parameter's `.grad`; temporary is the rest of a step's memory, gradients of activations and autocast's copies of
    weights included; the inputs, and whatever is none of these, are other.

    In inference, activations are what the model's modules make in a pass, and the KV cache is all that is kept from
    one pass to the next: keys and values, their copies in the order of the beams, an encoder's output.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    KV_CACHE = "kv-cache"
    TEMPORARY = "temporary"
    OTHER = "other"


CATEGORY_NAMES: Mapping[str, str] = {
    **{category: category.value for category in Category},
    Category.OPTIMIZER: "optimizer states", Category.KV_CACHE: "KV cache", Category.OTHER: "rounding and other",
}  # fmt: skip
"""Each category as a person reads it."""
MODEL_STATES = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)
"""Categories that the model and its optimizer hold from step to step."""


class OpClass(StrEnum):
    """The kind of work that an op does, by which of the device's limits binds it."""

    CONTRACTION = "tensor contraction"
    NORMALIZATION = "statistical normalization"
    ELEMENTWISE = "element-wise"
    MOVEMENT = "data movement"
    COMMUNICATION = "communication"
    OTHER = "other"


class Place(StrEnum):
    """The memory that an allocation lies in. On a processor that trains, its own memory is the device's."""

    DEVICE = "device"
    HOST = "host"
    DRIVE = "drive"


class Stream(StrEnum):
    """The queue that an op runs in: the ops of a stream run one after another, streams run side by side.

    Copies in go from the host's memory to the device's, copies out the other way; what processes exchange goes over
    the NETWORK; the host's own work runs in HOST.
    """

    COMPUTE = "compute"
    COPY_IN = "copy-in"
    COPY_OUT = "copy-out"
    NETWORK = "network"
    HOST = "host"


COPIES = (Stream.COPY_IN, Stream.COPY_OUT)


class Phase(StrEnum):
    """The part of a run that an op belongs to."""

    SETUP = "setup"
    DATA = "data"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    SAVE = "save"
    RESUME = "resume"
    PREFILL = "prefill"
    DECODE = "decode"


WALL_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""The phases that a training step's wall seconds are split into; recomputation is part of the backward phase."""


@dataclass(slots=True)
class Op:
    """One operation that the device runs.

    name: as the framework names it, such as `aten.mm`.
    module: dotted name of the model's module it belongs to; empty outside of all.
    shapes: the shapes of its tensor arguments, in order.
    dtype: the number format it computes in, such as `bfloat16`.
    flops: floating-point operations; 0 where it is bound by memory.
    bytes_read, bytes_written: bytes of device memory; of what processes exchange, bytes sent and received.
    kernels: how many kernels it launches. calls: calls of compiled graphs that begin with it.
    seconds: how long it takes; None where that is not known.
    stream: the queue it runs in.
    after: ticks of the ops on other streams whose end it waits for; of one that runs repeatedly, the latest run's.
    leading: elements from one row to the next of a matrix product's operands and of its result.
    layout: `strided` where tensors of an op that memory binds are broadcast or lie in other orders than one another,
        `cast` where it changes their number format; of fused attention `dropout` where it drops pairs.
    """

    name: str
    tick: Tick
    phase: Phase
    op_class: OpClass
    module: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    flops: Count = 0
    bytes_read: Count = 0
    bytes_written: Count = 0
    kernels: Count = 1
    calls: Count = 0
    seconds: Seconds | None = None
    stream: Stream = Stream.COMPUTE
    after: tuple[Tick, ...] = ()
    leading: tuple[int, ...] = ()
    layout: Literal["", "strided", "cast", "dropout"] = ""


@dataclass(slots=True)
class Allocation:
    """A piece of memory, alive in the ticks from `born` up to, not including, `died`; None lives on.

    category: what it holds from the tick `category_since` on; before it is temporary.
    op: the op that asked for it.
    place: the memory it lies in. pinned: whether it is host memory that is page-locked for the device's copies.
    """

    born: Tick
    died: Tick | None
    bytes: Count
    category: Category = Category.TEMPORARY
    category_since: Tick = 0
    module: str = ""
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    place: Place = Place.DEVICE
    pinned: bool = False

    def holds(self, tick: int) -> Category:
        """Its category at a tick at which it is alive."""
        return self.category if self.category_since <= tick else Category.TEMPORARY


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of ticks, from `start` up to, not including, `stop`.

    name: `step 1`, `step 2`, `evaluation`, `save`, `resume`; inside a step, `forward` and `backward` of each
        micro-batch, and `optimizer`; in inference `prefill` and `decode`.
    step: the optimizer step it lies in, counted from 1; 0 outside of all.
    times: how often it is run where the trace holds it once: a global batch's micro-batches that are all alike, or
        decoding passes between the first and the last.
    seconds: wall seconds, where it was measured.
    """

    name: str
    start: Tick
    stop: Tick
    step: Count = 0
    times: Count = 1
    seconds: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class UntracedMemory:
    """Memory that tracing cannot see, as a figure of its own.

    where: `context` outside the allocator, `allocator` inside it, `host` in the machine's own memory.
    source: where the figure comes from, as a sentence. uncertainty: bytes that it may be more or less by.
    born: the tick in which it is asked for, of memory inside the allocator; it is kept from then on.
    """

    name: str
    bytes: int
    where: Literal["context", "allocator", "host"]
    source: str
    uncertainty: int = 0
    born: Tick = field(default=0, compare=False)


@dataclass(kw_only=True)
class Trace:
    """The ops and allocations of a run, from building the model to the second step, evaluation, saving and resuming.

    origin: whether it was predicted or measured. notes: sentences about how sure it is.
    laid_out: whether a compiler laid its memory out as a whole, so that no allocator rounds or keeps any of it.
    """

    origin: Literal["predicted", "measured"]
    ops: list[Op] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    untraced: list[UntracedMemory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    laid_out: bool = False

    def untraced_bytes(self, where: str) -> int:
        """Bytes that tracing does not see, in `context`, `allocator` or `host`."""
        return sum(figure.bytes for figure in self.untraced if figure.where == where)

    def span(self, name: str) -> Span:
        """The first span of that name. Raises KeyError where there is none."""
        for span in self.spans:
            if span.name == name:
                return span
        raise KeyError(name)

    def spans_of(self, name: str, step: int) -> list[Span]:
        return [span for span in self.spans if span.name == name and span.step == step]

    def lying_in(self, place: Place) -> list[Allocation]:
        """The allocations that lie in that memory."""
        return [a for a in self.allocations if a.place is place]

    def curve(self, place: Place = Place.DEVICE) -> tuple[np.ndarray, np.ndarray]:
        """Ticks at which memory changes, int64 (N,), and the bytes allocated from each on, int64 (N,)."""
        return live_bytes(self.lying_in(place))

    def peak(self, start: int = 0, stop: int | None = None, place: Place = Place.DEVICE) -> tuple[int, int]:
        """The tick, from `start` up to, not including, `stop`, with the most bytes allocated, and those bytes."""
        ticks, live = self.curve(place)
        first = int(np.searchsorted(ticks, start, side="right")) - 1  # what is alive as the stretch begins
        last = len(ticks) if stop is None else int(np.searchsorted(ticks, stop, side="left"))
        low = max(first, 0)
        if low >= last:
            return start, 0
        at = low + int(np.argmax(live[low:last]))
        return max(int(ticks[at]), start), int(live[at])

    def alive(self, tick: int, place: Place = Place.DEVICE) -> list[Allocation]:
        """The allocations alive at that tick, the largest first."""
        found = [a for a in self.lying_in(place) if a.born <= tick and (a.died is None or a.died > tick)]
        return sorted(found, key=lambda a: -a.bytes)

    def by_category(self, tick: int, place: Place = Place.DEVICE) -> dict[Category, int]:
        """Bytes alive at that tick, by what they hold at it."""
        totals = dict.fromkeys(Category, 0)
        for allocation in self.alive(tick, place):
            totals[allocation.holds(tick)] += allocation.bytes
        return totals

    def last_step(self) -> Span | None:
        """The last optimizer step that the trace holds."""
        steps = [span for span in self.spans if span.step and span.name.startswith("step ")]
        return steps[-1] if steps else None

    def step_ops(self) -> Iterable[tuple[Op, int]]:
        """The ops of the last step that the trace holds, each with how often it runs in it."""
        times = self.times_in_step(op.tick for op in self.ops)
        return ((op, count) for op, count in zip(self.ops, times, strict=True) if count)

    def times_in_step(self, ticks: Iterable[int]) -> Iterator[int]:
        """Number of times that the last step of the trace runs what is at each tick; 0 of what is outside of it."""
        whole = self.last_step()
        repeated = [s for s in self.spans if whole is not None and s.step == whole.step and s.times > 1]
        for tick in ticks:
            inside = whole is not None and whole.start <= tick < whole.stop
            yield next((s.times for s in repeated if s.start <= tick < s.stop), 1) if inside else 0


def live_bytes(allocations: Iterable[Allocation]) -> tuple[np.ndarray, np.ndarray]:
    """Ticks at which memory changes, in order, and the bytes alive from each on."""
    events = [(a.born, a.bytes) for a in allocations]
    events += [(a.died, -a.bytes) for a in allocations if a.died is not None]
    array = np.array(events, dtype=np.int64).reshape(-1, 2)
    array = array[np.argsort(array[:, 0], kind="stable")]
    ticks, starts = np.unique(array[:, 0], return_index=True)
    return ticks, np.cumsum(np.add.reduceat(array[:, 1], starts))
