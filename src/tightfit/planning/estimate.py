"""One candidate's cost, read off its trace: memory through the allocator, time through the time model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tightfit.devices import Device
from tightfit.planning.allocator.replay import Fits, Replay
from tightfit.planning.plan import Estimate, Memory, Time
from tightfit.planning.timing.step_time import StepTime
from tightfit.recipe import Recipe
from tightfit.system import HostMemory, pinned_size
from tightfit.tasks import TASKS
from tightfit.text import size
from tightfit.trace import Category, Place, Trace, UntracedMemory


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The functions that planning is done with.

    predict: a resolved recipe's trace on a device. Raises Refused or ModelError for what cannot be built.
    replay: a trace through the device's allocator, of so many bytes or without end.
    step_time: the time of the trace's last step.
    mfu: model FLOPs utilization, 0 to 1, of a step that takes so many seconds; 0 where the peak is not known.
    expandable_replay: the same as `replay`, with segments that grow page by page; None: the same altogether.
    unseen: what a trace that was made from another recipe's or device's does not show; None: the same as that one.
    host: the memory of the machine that the device is in, for what is offloaded to it; None where it is not known.
    """

    predict: Callable[[Recipe, Device], Trace]
    replay: Callable[[Trace, int | None], Replay]
    step_time: Callable[[Trace, Recipe, Device], StepTime]
    mfu: Callable[[Recipe, Device, float], float]
    unseen: Callable[[Recipe, Device, Trace], list[UntracedMemory]] | None = None
    host: HostMemory | None = None
    expandable_replay: Callable[[Trace, int | None], Replay] | None = None

    def of(self, recipe: Recipe) -> Tools:
        """The same, with the allocator set as a resolved recipe says."""
        if recipe.expandable_segments is not True or self.expandable_replay is None:
            return self
        return replace(self, replay=self.expandable_replay)

    def with_unseen(self, trace: Trace, recipe: Recipe, device: Device) -> Trace:
        """A trace that was made from another's, with what it does not show of a resolved recipe on a device."""
        return trace if self.unseen is None else replace(trace, unseen=self.unseen(recipe, device, trace))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a trace lies in a device's memory; fields as in `Estimate`. notes: why the host's memory does not serve."""

    memory: Memory
    fits: Fits
    safe: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Memory of a device that is to stay free: a share of all of it, and a fixed number of bytes.

    It covers what no trace shows: the predictions' own error, other processes, a display.
    """

    share: float = 0.03
    fixed: int = 256 << 20

    def of(self, device: Device) -> int:
        return round(self.share * device.memory_bytes) + self.fixed


def capacity(trace: Trace, device: Device) -> int:
    """Bytes of the device's memory outside its context."""
    return max(device.memory_bytes - unseen(trace, "context"), 0)


def unseen(trace: Trace, where: str) -> int:
    """Bytes that tracing does not see, in `context`, `allocator` or `host`."""
    return sum(figure.bytes for figure in trace.unseen if figure.where == where)


def fit(trace: Trace, device: Device, tools: Tools, margin: Margin) -> Fit:
    """The trace's memory on the device and in the host, and whether it fits."""
    if device.kind == "cpu":
        trace = in_one_memory(trace)
    room, spare = capacity(trace, device), margin.of(device)
    host = host_need(trace)
    fits: Fits
    if device.kind == "cpu" or trace.laid_out:  # no caching allocator: reserved is allocated, and nothing is rounded
        tick, allocated = trace.peak()
        reserved = allocated = allocated + unseen(trace, "allocator")
        fits, safe, missing = ("yes" if reserved <= room else "no"), reserved <= room - spare, max(reserved - room, 0)
    else:
        replayed = tools.replay(trace, max(room - spare, 1))
        safe = replayed.fits != "no"
        if not safe or replayed.fits == "with-retries":
            replayed = tools.replay(trace, max(room, 1))
        tick, allocated, reserved = replayed.peak_tick, replayed.peak_allocated, replayed.peak_reserved
        # with all that it would take without end, it fits; a tight allocator can be said to miss more
        fits, missing = replayed.fits, min(replayed.missing, max(reserved - room, 0))
    lack = {} if tools.host is None else host.lack(tools.host)
    if lack:
        fits, safe = "no", False
    memory = Memory(
        peak_allocated=allocated,
        peak_reserved=reserved,
        context=unseen(trace, "context"),
        host=host.total,
        by_category=by_category(trace, tick, allocated),
        peak_in=running_at(trace, tick),
        capacity=room,
        margin=spare,
        missing=missing,
        host_missing=max(lack.values(), default=0),
    )
    return Fit(memory=memory, fits=fits, safe=safe, notes=tuple(lack))


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Bytes of the host's memory at its own peak. offloaded: what the trace keeps there. pinned: what of that is
    page-locked, as PyTorch rounds it up. unseen: what tracing does not see."""

    offloaded: int
    pinned: int
    unseen: int

    @property
    def total(self) -> int:
        return self.offloaded + self.unseen

    def lack(self, host: HostMemory) -> dict[str, int]:
        """Reasons why it does not fit, as sentences, and the bytes that each misses. Without anything offloaded, none:
        what loading takes is a matter of the run."""
        found = {}
        if self.offloaded and self.total > host.total:
            found[f"host memory: {size(self.total)} are needed, {size(self.offloaded)} of them for what is offloaded, "
                  f"and this machine has {size(host.total)}"] = self.total - host.total
        if host.pinnable is not None and self.pinned > host.pinnable:
            found[f"host memory: {size(self.pinned)} have to be page-locked, and this machine allows "
                  f"{size(host.pinnable)}"] = self.pinned - host.pinnable
        return found


def host_need(trace: Trace) -> HostNeed:
    """The host's memory that a trace takes."""
    kept = [replace(a, bytes=pinned_size(a.bytes)) if a.pinned and a.bytes else a for a in trace.lying_in(Place.HOST)]
    whole, pinned = (Trace(origin=trace.origin, allocations=allocations).peak(place=Place.HOST)[1]
                     for allocations in (kept, [a for a in kept if a.pinned]))
    return HostNeed(offloaded=whole, pinned=pinned, unseen=unseen(trace, "host"))


def in_one_memory(trace: Trace) -> Trace:
    """The trace on a processor, whose memory is the host's: nothing in it is page-locked."""
    if not trace.lying_in(Place.HOST):
        return trace
    return replace(trace, allocations=[replace(a, place=Place.DEVICE) if a.place is Place.HOST else a
                                       for a in trace.allocations])


def steps_alone(trace: Trace) -> Trace:
    """The trace up to the end of its last step: what a few steps take, without evaluation, saving and resuming."""
    last = trace.last_step()
    if last is None:
        return trace
    kept = [replace(a, died=None if a.died is None or a.died >= last.stop else a.died)
            for a in trace.allocations if a.born < last.stop]
    return replace(trace, allocations=kept, spans=[span for span in trace.spans if span.start < last.stop])


def by_category(trace: Trace, tick: int, total: int) -> dict[str, int]:
    """Bytes at a tick by what they hold, which sum to `total`: rounding, and what tracing does not see, is `other`."""
    held = {category.value: count for category, count in trace.by_category(tick).items()}
    if not held[Category.KV_CACHE.value]:  # training has none
        del held[Category.KV_CACHE.value]
    held[Category.OTHER.value] += total - sum(held.values())
    return held


def running_at(trace: Trace, tick: int) -> str:
    """The work that runs at a tick, such as `backward of a micro-batch`."""
    inside = [span for span in trace.spans if span.start <= tick < span.stop]
    if not inside:
        return "building the model"
    span = min(inside, key=lambda s: s.stop - s.start)
    names = {"forward": "forward of a micro-batch", "backward": "backward of a micro-batch", "decode": "decoding"}
    if all(other.name != "decode" for other in trace.spans):
        names["prefill"] = "forward pass"
    return names.get(span.name, span.name)


def step_cost(timed: StepTime, recipe: Recipe, device: Device, tools: Tools) -> Time:
    """Time of a step of a resolved recipe, in every unit."""
    seconds = timed.seconds
    tokens = recipe.seq_len if TASKS[recipe.task].reads == "tokens" else 0
    samples = recipe.batch_size / seconds if seconds > 0 else 0.0
    return Time(
        step_seconds=seconds,
        samples_per_second=samples,
        tokens_per_second=samples * tokens,
        mfu=tools.mfu(recipe, device, seconds),
        calibrated=timed.calibrated,
    )


def join(trace: Trace, found: Fit, time: Time, notes: Sequence[str]) -> Estimate:
    """An estimate from its parts. notes: of the time."""
    return Estimate(
        fits=found.fits,
        safe=found.safe,
        memory=found.memory,
        time=time,
        unseen=tuple(trace.unseen),
        notes=tuple(dict.fromkeys([*found.notes, *trace.notes, *notes])),
    )


def estimate(trace: Trace, recipe: Recipe, device: Device, tools: Tools, margin: Margin | None = None) -> Estimate:
    """Memory and time of a resolved recipe, from its trace."""
    tools = tools.of(recipe)
    timed = tools.step_time(trace, recipe, device)
    found = fit(trace, device, tools, margin or Margin())
    return join(trace, found, step_cost(timed, recipe, device, tools), timed.notes)
