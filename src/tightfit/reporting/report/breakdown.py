"""Where a step's time goes: by op class and phase, by module, by op, and how near each op comes to the roofline."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import PHASES
from tightfit.profiles import Profile
from tightfit.recipe import Recipe
from tightfit.trace import Op, OpClass, Phase, Trace

PASSES = PHASES
"""Of the step's ops, as the time model tells them apart."""
OUTSIDE = "(outside of all modules)"


@dataclass(frozen=True)
class TimedOp:
    """An op of the step: how often it runs in it, and the seconds of one run; None where they are not known."""

    op: Op
    times: int
    seconds: float | None

    @property
    def in_all(self) -> float:
        return self.times * (self.seconds or 0.0)


@dataclass(kw_only=True)
class Row:
    """Ops of one kind together, over a whole step. seconds: by phase, all runs. roof: seconds at the roofline."""

    name: str
    op_class: OpClass
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    runs: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    roof: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

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


def timed_ops(trace: Trace | None, recipe: Recipe, device: Device) -> list[TimedOp]:
    """The ops of the trace's last step with their seconds: measured where they were, else the time model's."""
    if trace is None:
        return []
    ops = list(trace.step_ops()) or [(op, 1) for op in trace.ops]
    tf32 = bool(getattr(recipe.precision, "tf32", False))
    known: dict[tuple[object, ...], float | None] = {}
    found = []
    for op, times in ops:
        seconds = op.seconds
        if seconds is None and trace.origin == "predicted":
            key = (op.name, op.shapes, op.dtype, op.flops, op.bytes_read, op.bytes_written, op.kernels, op.op_class)
            if key not in known:
                known[key] = _modelled(op, device, tf32)
            seconds = known[key]
        found.append(TimedOp(op, times, seconds))
    return found


def _modelled(op: Op, device: Device, tf32: bool) -> float | None:
    try:
        return op_seconds(op, device, tf32=tf32)
    except (TightfitError, ZeroDivisionError):
        return None


def busy_seconds(ops: Iterable[TimedOp]) -> float:
    return sum(op.in_all for op in ops)


def whole(profile: Profile, ops: Iterable[TimedOp]) -> float:
    """The seconds that shares of ops are of: the step's, or the ops' own where they sum to more, as they do where an
    instrumented step's ops are slower than a plain one's."""
    return max(profile.step_seconds, busy_seconds(ops))


def phase_of(op: Op) -> Phase:
    return op.phase if op.phase in PASSES else Phase.FORWARD


def by_class(ops: Iterable[TimedOp]) -> dict[OpClass, dict[Phase, float]]:
    """Seconds by op class and phase."""
    found: dict[OpClass, dict[Phase, float]] = {}
    for timed in ops:
        row = found.setdefault(timed.op.op_class, dict.fromkeys(PASSES, 0.0))
        row[phase_of(timed.op)] += timed.in_all
    return {kind: found[kind] for kind in OpClass if kind in found}


def module_name(module: str) -> str:
    """A module's name with the numbers of its blocks left out: `transformer.h.*.attn`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) or OUTSIDE


def by_module(ops: Iterable[TimedOp]) -> list[tuple[str, dict[Phase, float]]]:
    """Seconds by module, equal blocks together, and phase; the longest first."""
    found: dict[str, dict[Phase, float]] = {}
    for timed in ops:
        row = found.setdefault(module_name(timed.op.module), dict.fromkeys(PASSES, 0.0))
        row[phase_of(timed.op)] += timed.in_all
    return sorted(found.items(), key=lambda item: -sum(item[1].values()))


def rows(ops: Iterable[TimedOp], device: Device, recipe: Recipe) -> list[Row]:
    """Ops of one name, shape and number format together; the longest first."""
    tf32 = bool(getattr(recipe.precision, "tf32", False))
    found: dict[tuple[object, ...], Row] = {}
    for timed in ops:
        op = timed.op
        key = (op.name, op.shapes, op.dtype)
        row = found.get(key)
        if row is None:
            row = found[key] = Row(name=op.name, op_class=op.op_class, dtype=op.dtype, shapes=op.shapes)
        row.runs += timed.times
        row.flops += timed.times * op.flops
        row.bytes += timed.times * (op.bytes_read + op.bytes_written)
        row.seconds[phase_of(op)] += timed.in_all
        row.roof += timed.times * roof_seconds(op, device, tf32)
    return sorted(found.values(), key=lambda row: -row.total)


def roof_seconds(op: Op, device: Device, tf32: bool = False) -> float:
    """Seconds that the op takes at least, by the device's peak and its memory's bandwidth; 0 where not known."""
    peak = device.peak(op.dtype, tf32)
    if not device.bandwidth or not peak:
        return 0.0
    return max(op.flops / peak, (op.bytes_read + op.bytes_written) / device.bandwidth)


def shapes_text(shapes: Sequence[Sequence[int]], most: int = 3) -> str:
    """Shapes for reading: `(2, 64) (64,)`, with what is left out counted."""
    said = " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:most])
    return f"{said} +{len(shapes) - most}" if len(shapes) > most else said
