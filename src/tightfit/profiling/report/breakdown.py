"""Where a step's time goes: by op class, module and op, and how near each op comes to the roofline.

Ops are pairs of an op and how often the step runs it, as `Trace.step_ops` gives them; an op's seconds are of one run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tightfit.devices import Device
from tightfit.planning.timing.step_time import PHASES
from tightfit.trace import Op, OpClass, Phase, Trace

Ops = list[tuple[Op, int]]
ByPhase = dict[Phase, float]
OUTSIDE = "(outside of all modules)"


@dataclass(kw_only=True)
class OpGroup:
    """Ops of one name, shape and number format, over a whole step. seconds: by phase. roof: seconds at the roofline."""

    name: str
    op_class: OpClass
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    runs: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: ByPhase = field(default_factory=lambda: defaultdict(float))
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


def step_ops(trace: Trace | None) -> Ops:
    """The ops of the trace's last step; all of them where it has no spans."""
    return [] if trace is None else list(trace.step_ops()) or [(op, 1) for op in trace.ops]


def busy_seconds(ops: Iterable[tuple[Op, int]]) -> float:
    """The seconds that the ops take together."""
    return sum(times * (op.seconds or 0.0) for op, times in ops)


def seconds_by(ops: Ops, key: Callable[[Op], str]) -> dict[str, ByPhase]:
    """Seconds by what `key` says of an op, and by phase; the longest first."""
    found: dict[str, ByPhase] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for op, times in ops:
        found[key(op)][phase_of(op)] += times * (op.seconds or 0.0)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def phase_of(op: Op) -> Phase:
    return op.phase if op.phase in PHASES else Phase.FORWARD


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
        group.seconds[phase_of(op)] += times * (op.seconds or 0.0)
        group.roof += times * roof_seconds(op, device, tf32)
    return sorted(found.values(), key=lambda group: -group.total)


def roof_seconds(op: Op, device: Device, tf32: bool) -> float:
    """Seconds that the op takes at least, by the device's peak and its memory's bandwidth; 0 where not known."""
    peak = device.peak(op.dtype, tf32)
    if not device.bandwidth or not peak:
        return 0.0
    return max(op.flops / peak, (op.bytes_read + op.bytes_written) / device.bandwidth)
