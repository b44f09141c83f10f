"""From a profile with marks to a trace: seconds for every op, and every allocation with what it holds.

Ticks are nanoseconds since the step began, on the host's clock. Allocations are the profiler's own events, identified
by the op they happen in and by their address; where it has none they are the tensors that were followed. On CUDA an
op's seconds are those of the kernels that it launched.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch._C._profiler import _EventType

from tightfit.backends.pytorch.measure.marks import MARK, Marks
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Place, Span, Stream, Trace
from tightfit.trace.lanes import Stretch, joined

COMPILED_CODE = "compiled code"
"""Time and memory of a compiled region itself, without the ops that it calls."""
OUTSIDE_OF_OPS = "outside of ops"
"""Memory that no dispatched op asks for, such as copies of the random generator's state."""
REGION = "## Call CompiledFxGraph"
"""Mark of Inductor on a call of what it compiled."""
CLASSES = {"triton_poi": OpClass.ELEMENTWISE, "triton_red": OpClass.NORMALIZATION, "triton_per": OpClass.NORMALIZATION,
           "triton_tem": OpClass.CONTRACTION, "triton_mm": OpClass.CONTRACTION, "Memcpy": OpClass.MOVEMENT,
           "Memset": OpClass.MOVEMENT}
"""Classes of kernels that no dispatched op launched, by how their names begin."""
MEMCPY = {"Memcpy HtoD": Stream.COPY_IN, "Memcpy DtoH": Stream.COPY_OUT}
"""Copies between host and device, by how CUPTI's names of them begin."""
MATMUL_KERNELS = ("gemm", "nvjet", "cutlass", "fmha", "flash")
"""Parts of the names of kernels of matrix products and attention."""


@dataclass
class Events:
    """A profile's events as far as they matter, in nanoseconds.

    calls, phases, gradients: start and stop by the numbers of their marks. regions: the same of compiled code.
    memory: when, address, bytes asked for (negative: given back), and the op's mark, None outside of all.
    kernels: name, start, stop, and the host's launch of it.
    """

    calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    phases: dict[int, tuple[int, int]] = field(default_factory=dict)
    gradients: dict[int, tuple[int, int]] = field(default_factory=dict)
    regions: dict[int, tuple[int, int]] = field(default_factory=dict)
    memory: list[tuple[int, int, int, int | None]] = field(default_factory=list)
    kernels: list[tuple[str, int, int, int]] = field(default_factory=list)


def measured_trace(marks: Marks, profile: Events, kind: str) -> Trace:
    """The trace of the one step that was marked. kind: of the device that the step ran on, `cpu` or `cuda`."""
    start = _start(profile)
    spans = list(_spans(marks, profile, start))
    ops = sorted(_ops(marks, profile, start), key=lambda op: op.tick)
    made = _allocated(marks, profile, start) if profile.memory else _followed(marks, profile, start)
    if kind == "cuda" and profile.memory:  # which is of the device's memory alone
        made += [a for a in _followed(marks, profile, start) if a.place is Place.HOST]
    if marks.held_elsewhere:
        made.append(Allocation(born=0, died=None, bytes=marks.held_elsewhere, category=Category.OTHER,
                               op="held before the step"))
    return Trace(origin="measured", ops=ops, allocations=made, spans=spans)


def measured_lanes(marks: Marks, profile: Events) -> tuple[Stretch, ...]:
    """Times at which the device computed and copied in that step; none on a processor, which has no kernels."""
    start, phase_at = _start(profile), _finder(profile.phases)
    return joined(
        Stretch(next((stream for kind, stream in MEMCPY.items() if name.startswith(kind)), Stream.COMPUTE),
                _phase_of(marks, phase_at(launched)), (begin - start) / 1e9, (end - start) / 1e9)
        for name, begin, end, launched in profile.kernels)


def _start(profile: Events) -> int:
    return min((begin for begin, _ in profile.phases.values()), default=0)


def read(results: Any, kind: str) -> Events:
    """kineto's results, of torch.profiler, with the memory of that kind of device. Its event tree alone has addresses,
    its flat list alone has kernels."""
    profile, launches = Events(), dict[int, int]()
    for event, mark in _walk(results.experimental_event_tree(), None):
        name = event.name
        if name.startswith(MARK):
            what, number = name.removeprefix(MARK).split(":")
            where = {"op": profile.calls, "phase": profile.phases, "grad": profile.gradients}[what]
            where[int(number)] = (event.start_time_ns, event.start_time_ns + event.duration_time_ns)
        elif name.startswith(REGION):
            stretch = (event.start_time_ns, event.start_time_ns + event.duration_time_ns)
            profile.regions[len(profile.regions)] = stretch
        elif name == "[memory]" and event.extra_fields.device.type == kind:
            detail = event.extra_fields
            profile.memory.append((event.start_time_ns, detail.ptr, detail.alloc_size, mark))
    waiting = []
    for event in results.events():
        if event.device_type().name != "CPU":
            if not event.is_user_annotation():
                waiting.append((event.name(), event.start_ns(), event.end_ns(), event.correlation_id()))
        elif event.name().startswith("cu"):  # cudaLaunchKernel, cuLaunchKernelEx, cudaMemcpyAsync, ...
            launches[event.correlation_id()] = event.start_ns()
    profile.kernels = [(name, begin, end, launches.get(link, begin)) for name, begin, end, link in waiting]
    profile.memory.sort(key=lambda change: change[0])
    return profile


def _walk(events: Iterable[Any], mark: int | None) -> Iterator[tuple[Any, int | None]]:
    """Every event of the host's in a tree, with the mark of the op that it lies in."""
    waiting = [(event, mark) for event in events]
    while waiting:
        event, mark = waiting.pop()
        if event.tag is _EventType.Kineto:  # on a GPU, a mark's own line of the device's time has the mark's name
            continue
        yield event, mark
        inner = mark
        if event.name.startswith(f"{MARK}op:"):
            inner = int(event.name.removeprefix(f"{MARK}op:"))
        waiting.extend((child, inner) for child in event.children)


def _spans(marks: Marks, profile: Events, start: int) -> Iterator[Span]:
    bounds = [profile.phases[number] for number in range(len(marks.phases))]
    if not bounds:
        return
    stop = max([end for _, end in bounds])
    yield Span(name="step 1", start=0, stop=stop - start + 1, step=1, seconds=(stop - start) / 1e9)
    for phase, (begin, end) in zip(marks.phases, bounds, strict=True):
        yield Span(name=phase.value, start=begin - start, stop=end - start, step=1, seconds=(end - begin) / 1e9)


def _ops(marks: Marks, profile: Events, start: int) -> Iterator[Op]:
    """The ops that were dispatched, each with its seconds, and kernels that none launched, such as compiled ones."""
    op_at, phase_at = _finder(profile.calls), _finder(profile.phases)
    taken: dict[int, float] = {}
    for name, begin, end, launched in profile.kernels:
        number, seconds = op_at(launched), (end - begin) / 1e9
        if number is not None:
            taken[number] = taken.get(number, 0.0) + seconds
        else:
            yield Op(name=name, tick=launched - start, phase=_phase_of(marks, phase_at(launched)),
                     op_class=_class_of(name), seconds=seconds)
    called = {number: call.op for number, call in enumerate(marks.calls)
              if call.op is not None and number in profile.calls}
    ticks = {op.tick: profile.calls[number][0] - start for number, op in called.items()}
    for number, op in called.items():
        begin, end = profile.calls[number]
        seconds = taken.get(number, 0.0) if profile.kernels else (end - begin) / 1e9
        yield replace(op, tick=begin - start, seconds=seconds,
                      after=tuple(ticks[tick] for tick in op.after if tick in ticks))
    if not profile.kernels:
        yield from _regions(marks, profile, start)


def _phase_of(marks: Marks, number: int | None) -> Phase:
    return Phase.SETUP if number is None else marks.phases[number]


def _regions(marks: Marks, profile: Events, start: int) -> Iterator[Op]:
    """Compiled code on the CPU: what a call of it takes without the ops that it calls."""
    region_at, phase_at = _finder(profile.regions), _finder(profile.phases)
    inside, modules = dict.fromkeys(profile.regions, 0), dict[int, str]()
    for number, (begin, end) in profile.calls.items():
        region = region_at(begin)
        if region is not None:
            inside[region] += end - begin
            modules.setdefault(region, marks.calls[number].module)
    for region, (begin, end) in profile.regions.items():
        yield Op(name=COMPILED_CODE, tick=begin - start, phase=_phase_of(marks, phase_at(begin)),
                 op_class=OpClass.ELEMENTWISE, module=modules.get(region, ""),
                 seconds=max(end - begin - inside[region], 0) / 1e9)


def _class_of(kernel: str) -> OpClass:
    known = next((kind for start, kind in CLASSES.items() if kernel.startswith(start)), None)
    if known is not None:
        return known
    return OpClass.CONTRACTION if any(part in kernel.lower() for part in MATMUL_KERNELS) else OpClass.OTHER


def _finder(stretches: dict[int, tuple[int, int]]) -> Callable[[int], int | None]:
    """The one of some stretches, which do not overlap, that a moment lies in."""
    ordered = sorted((begin, end, number) for number, (begin, end) in stretches.items())
    begins = [begin for begin, _, _ in ordered]

    def find(moment: int) -> int | None:
        at = bisect.bisect_right(begins, moment) - 1
        return ordered[at][2] if at >= 0 and moment <= ordered[at][1] else None

    return find


def _allocated(marks: Marks, profile: Events, start: int) -> list[Allocation]:
    """Allocations as the allocator handed them out, identified by op and address."""
    when, region_at = _clock(marks, profile, start), _finder(profile.regions)
    alive = {address: replace(a, born=0, category_since=0, died=None) for address, a in marks.held.items()}
    found = list(alive.values())
    unknown = []
    gradients = [(stretch[0], number) for number, stretch in sorted(profile.gradients.items())]
    events: list[tuple[int, int, int, int | None]] = [*profile.memory, *((at, 0, 0, n) for at, n in gradients)]
    for moment, address, size, mark in sorted(events, key=lambda event: event[0]):
        tick = max(moment - start, 0)
        if size > 0:
            call = None if mark is None else marks.calls[mark]
            known = None if call is None else call.made.get(address)
            if known is not None:
                since = max(when(known.category_since), tick)
                made = replace(known, born=tick, died=None, bytes=size, category_since=since)
            elif call is not None:
                made = Allocation(born=tick, died=None, bytes=size, module=call.module, op=call.name)
            elif region_at(moment) is not None:
                made = Allocation(born=tick, died=None, bytes=size, op=COMPILED_CODE)
                unknown.append(made)
            else:
                made = Allocation(born=tick, died=None, bytes=size, op=OUTSIDE_OF_OPS, category=Category.OTHER,
                                  category_since=tick)
            alive[address] = made
            found.append(made)
        elif size < 0 and (gone := alive.pop(address, None)) is not None:
            gone.died = tick
        elif size == 0 and mark is not None:
            held, owner = marks.gradients[mark]
            if held in alive and alive[held].category is not Category.GRADIENTS:
                alive[held].category, alive[held].category_since, alive[held].module = Category.GRADIENTS, tick, owner
    _find_activations(unknown, marks, profile, start)
    return found


def _find_activations(unknown: Iterable[Allocation], marks: Marks, profile: Events, start: int) -> None:
    """Memory that compiled code asks for in a forward pass is kept for the backward pass where it lives until then."""
    phase_at = _finder(profile.phases)
    backwards = sorted(begin - start for number, (begin, _) in profile.phases.items()
                       if marks.phases[number] is Phase.BACKWARD)
    for made in unknown:
        at = bisect.bisect_right(backwards, made.born)
        forward = _phase_of(marks, phase_at(made.born + start)) is Phase.FORWARD
        if forward and at < len(backwards) and (made.died is None or made.died > backwards[at]):
            made.category, made.category_since = Category.ACTIVATIONS, made.born


def _followed(marks: Marks, profile: Events, start: int) -> list[Allocation]:
    """The tensors that were followed, with ticks on the host's clock."""
    when = _clock(marks, profile, start)
    return [
        replace(a, born=when(a.born), died=None if a.died is None else when(a.died),
                category_since=when(a.category_since))
        for a in marks.allocations
    ]


def _clock(marks: Marks, profile: Events, start: int) -> Callable[[int], int]:
    """The tracker's ticks as nanoseconds: those of the op that ran last."""
    known = [(call.tick, profile.calls[number][0] - start) for number, call in enumerate(marks.calls)
             if number in profile.calls]
    ticks = [tick for tick, _ in known]

    def when(tick: int) -> int:
        at = bisect.bisect_right(ticks, tick) - 1
        return max(known[at][1], 0) if at >= 0 else 0

    return when
