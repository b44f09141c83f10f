"""One step of a profile: its memory, and where its time goes, by phase, op class, module and op.

Ops are pairs of an op and how often the step runs it, as `Trace.step_ops` gives them; an op's seconds are of one run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from tightfit.devices import Device
from tightfit.planning.timing.step_time import TIMED_PHASES
from tightfit.profiling.profile import TRACES, Profile
from tightfit.trace import CATEGORY_NAMES, WALL_PHASES, Allocation, Category, Op, OpClass, Phase, Place, Span, Trace

Ops = list[tuple[Op, int]]
ByPhase = dict[Phase, float]
OUTSIDE = "(outside of all modules)"


@dataclass(frozen=True)
class ProfiledStep:
    """The last step of a trace. name: `measured` or `predicted`. wall: its seconds; those of its ops may sum to more.
    phase_seconds: the same by phase."""

    name: str
    trace: Trace
    wall: float
    phase_seconds: Mapping[Phase, float]

    @cached_property
    def ops(self) -> Ops:
        """Its ops; all of the trace's where that has no spans."""
        return list(self.trace.step_ops()) or [(op, 1) for op in self.trace.ops]

    @cached_property
    def busy(self) -> float:
        """The seconds that its ops take together."""
        return busy_seconds(self.ops)

    @property
    def whole(self) -> float:
        """The seconds that shares are of: the step's, or its ops' own where they sum to more, as they do where a traced
        step's ops are slower than a plain one's."""
        return max(self.wall, self.busy)

    def share(self, chosen: Callable[[Op], bool]) -> float:
        """The share of the step that some ops take."""
        return busy_seconds(each for each in self.ops if chosen(each[0])) / self.whole if self.whole else 0.0

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The tick at which its memory is highest, and the bytes."""
        return self._peak(Place.DEVICE)

    def _peak(self, place: Place) -> tuple[int, int]:
        step = step_of(self.trace)
        return self.trace.peak(step.start, step.stop, place)

    @cached_property
    def alive(self) -> list[Allocation]:
        """Activations and temporary memory at the peak, the largest first."""
        tick, _ = self.peak
        return [a for a in self.trace.alive(tick) if a.holds(tick) in (Category.ACTIVATIONS, Category.TEMPORARY)]

    def by_category(self, place: Place = Place.DEVICE) -> dict[str, float]:
        """Bytes by category at the peak of a memory."""
        held = self.trace.by_category(self._peak(place)[0], place)
        return {CATEGORY_NAMES[category]: held[category] for category in Category}

    def by_phase(self) -> dict[str, float]:
        """Wall seconds by phase."""
        return {phase.value: self.phase_seconds.get(phase, 0.0) for phase in WALL_PHASES} if self.phase_seconds else {}

    def by(self, key: Callable[[Op], str]) -> dict[str, float]:
        """Seconds of ops by what `key` says of them."""
        return {name: sum(row.values()) for name, row in seconds_by(self.ops, key).items()}


def steps_of(profile: Profile) -> dict[str, ProfiledStep]:
    """The measured and the predicted step, as far as they are there, by those names."""
    figures = {"measured": (profile.step_seconds, profile.phase_seconds),
               "predicted": (profile.predicted_step_seconds, profile.predicted_seconds)}  # fmt: skip
    return {name: ProfiledStep(name, trace, *figures[name])
            for name in TRACES if (trace := getattr(profile, name)) is not None}


def step_of(trace: Trace) -> Span:
    """The last step that the trace holds; all of it where it has no spans."""
    if (last := trace.last_step()) is not None:
        return last
    ticks = [op.tick for op in trace.ops] + [a.born for a in trace.allocations]
    return Span(name="step", start=min(ticks, default=0), stop=max(ticks, default=0) + 1)


@dataclass(kw_only=True)
class OpGroup:
    """Ops of one name, shape and number format, over a whole step. total: their seconds. roof: at the roofline."""

    name: str
    op_class: OpClass
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    runs: int = 0
    flops: int = 0
    bytes: int = 0
    total: float = 0.0
    roof: float = 0.0

    @property
    def achieved(self) -> float | None:
        """Share of the roofline that they reach; None where the device's figures or the ops' work are not known."""
        return self.roof / self.total if self.roof and self.total else None

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte of memory moved; None without either."""
        return self.flops / self.bytes if self.flops and self.bytes else None

    @property
    def rate(self) -> float:
        """FLOPs a second; 0 where nothing was timed."""
        return self.flops / self.total if self.total else 0.0


def busy_seconds(ops: Iterable[tuple[Op, int]]) -> float:
    """The seconds that the ops take together."""
    return sum(times * (op.seconds or 0.0) for op, times in ops)


def seconds_by(ops: Ops, key: Callable[[Op], str]) -> dict[str, ByPhase]:
    """Seconds by what `key` says of an op, and by phase; the longest first."""
    found: dict[str, ByPhase] = defaultdict(lambda: dict.fromkeys(TIMED_PHASES, 0.0))
    for op, times in ops:
        found[key(op)][op.phase if op.phase in TIMED_PHASES else Phase.FORWARD] += times * (op.seconds or 0.0)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def op_class(op: Op) -> str:
    return op.op_class.value


def block_name(module: str) -> str:
    """A module's name with the numbers of its blocks left out: `transformer.h.*.attn`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) or OUTSIDE


def module_of(op: Op) -> str:
    return block_name(op.module)


def op_groups(ops: Ops, device: Device, tf32: bool) -> list[OpGroup]:
    """Ops of one name, shape and number format together; the longest first. tf32: as `Device.peak` takes it."""
    found: dict[tuple[object, ...], OpGroup] = {}
    for op, times in ops:
        key = (op.name, op.shapes, op.dtype)
        group = found.get(key)
        if group is None:
            group = found[key] = OpGroup(name=op.name, op_class=op.op_class, dtype=op.dtype, shapes=op.shapes)
        group.runs += times
        group.flops += times * op.flops
        group.bytes += times * (op.bytes_read + op.bytes_written)
        group.total += times * (op.seconds or 0.0)
        group.roof += times * roof_seconds(op, device, tf32)
    return sorted(found.values(), key=lambda group: -group.total)


def roof_seconds(op: Op, device: Device, tf32: bool) -> float:
    """Seconds that the op takes at least, by the device's peak and its memory's bandwidth; 0 where not known."""
    peak = device.peak(op.dtype, tf32)
    if not device.bandwidth or not peak:
        return 0.0
    return max(op.flops / peak, (op.bytes_read + op.bytes_written) / device.bandwidth)
