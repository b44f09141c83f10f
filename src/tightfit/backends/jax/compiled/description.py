"""The trace of a compiled step, from XLA's dump of it: its kernels in the program's order, and its memory.

A tick is a place in the program's order. The kernels of a loop stand in it once, with the work of all its turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal

from tightfit.backends.jax.compiled.kernels import kernels
from tightfit.backends.jax.compiled.memory import Memory, read_memory, temporary_allocations
from tightfit.backends.jax.compiled.program import Program, read_program
from tightfit.trace import Allocation, Category, Op, Phase, Span, Trace, UntracedMemory

DUMPED = "*.jit_step.*{}_after_optimizations{}.txt"
"""XLA's files on `update.lower_step`'s program, by platform and kind; others may be compiled too."""
ASSIGNMENT, ALIVE, REPORT, PROGRAM = "-buffer-assignment", "-live-range", "-memory-usage-report", ""
"""XLA's kinds of files on a step whose memory is planned, in the order of writing, but for the program: it is first."""
STATE = {"params": Category.WEIGHTS, "optimizer": Category.OPTIMIZER}
"""Categories of the step's state by its parts; other arguments are other."""
KEYS = re.compile(r"\['([^']*)'\]|\.(\w+)")
NAMES = {Phase.RECOMPUTE: "backward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}
"""Spans by the phase of their kernels; forward for the rest."""


def memory_is_planned(dump: Path) -> bool:
    """Whether XLA has written all that a trace is read from: the report is the last of it, and kernels come after."""
    return any(dump.glob(DUMPED.format("gpu", REPORT))) and any(dump.glob("*.ll"))


@dataclass(frozen=True)
class Description:
    """A step as XLA compiled it. ops: its kernels, by the names of their instructions; their ticks are positions in the
    program's order, counted from 1."""

    program: Program
    memory: Memory
    ops: Mapping[str, Op]


def read_description(dump: Path, platform: str) -> Description:
    """The one step that was compiled for a platform, `gpu` or `cpu`, and dumped into this folder. Raises
    FileNotFoundError where there is none."""
    memory = read_memory(_text(dump, platform, ASSIGNMENT), alive := _text(dump, platform, ALIVE))
    program = read_program(_text(dump, platform, PROGRAM))
    return Description(program, memory, kernels(program, _positions(alive)))


def predicted_trace(described: Description) -> Trace:
    """The step's ops and the memory that XLA planned for it."""
    return _trace(described, list(described.ops.values()), "predicted")


def measured_trace(described: Description, seconds: Mapping[str, float]) -> Trace:
    """The same, with the seconds of each instruction, by its name, in all its turns. Ticks are nanoseconds of the
    program's order: each instruction stands in it once, as wide as all its turns."""
    timed = [replace(op, seconds=seconds.get(name, 0.0)) for name, op in described.ops.items()]
    trace = _trace(described, timed, "measured")
    widths = [1] * (described.memory.length + 2)  # a nanosecond at least, so that no two places become one
    for op in timed:
        widths[op.tick] += round(1e9 * (op.seconds or 0.0))
    moments = [0, *accumulate(widths)]
    trace.spans = [replace(span, start=moments[span.start], stop=moments[span.stop],
                           seconds=(moments[span.stop] - moments[span.start]) / 1e9) for span in trace.spans]
    for made in trace.allocations:
        made.born = moments[made.born]
        made.died = None if made.died is None else moments[made.died]
    for op in trace.ops:
        op.tick = moments[op.tick]
    return trace


def _trace(described: Description, ops: list[Op], origin: Literal["predicted", "measured"]) -> Trace:
    memory, stop = described.memory, described.memory.length + 1
    ops.sort(key=lambda op: op.tick)
    trace = Trace(origin=origin, laid_out=True, ops=ops)
    makers = {name: (op.name, op.module) for name, op in described.ops.items()}
    trace.allocations = [*_given(described, stop), *temporary_allocations(memory, makers)]
    trace.spans = [Span(name="step 1", start=1, stop=stop, step=1), *_spans(ops, stop)]
    if memory.host:
        trace.unseen.append(UntracedMemory(name="offloaded values", bytes=memory.host, where="host",
                                   source="XLA's own plan of the step's memory"))
    return trace


def _given(described: Description, stop: int) -> Iterator[Allocation]:
    """Arguments and results. The state lives on: its results take its place."""
    entry = described.program.computations[described.program.entry]
    for key, buffer in described.memory.inputs.items():
        name = entry[key].op_name if key in entry else key
        keys = [first or second for first, second in KEYS.findall(name)]
        state = name.startswith("state[")
        category = STATE.get(keys[0], Category.OTHER) if state and keys else Category.OTHER
        yield Allocation(
            born=0 if state else 1, died=None if state else stop, bytes=buffer.bytes, category=category,
            module=keys[-1] if keys else "", op=name, shape=buffer.shape, dtype=buffer.dtype,
        )  # fmt: skip
    for buffer in described.memory.outputs:
        yield Allocation(born=1, died=stop, bytes=buffer.bytes, category=Category.OTHER, op="results")


def _spans(ops: list[Op], stop: int) -> Iterator[Span]:
    """Stretches of the program that belong to one phase."""
    stretches = [(name, next(run).tick) for name, run in groupby(ops, lambda op: NAMES.get(op.phase, "forward"))]
    for (name, start), (_, end) in zip(stretches, [*stretches[1:], ("", stop)], strict=True):
        yield Span(name=name, start=start, stop=end, step=1)


def _positions(live_range: str) -> dict[str, int]:
    """Each instruction's place in the order in which the program runs, by name."""
    listed = live_range.partition("InstructionSequence:")[2].partition("BufferLiveRange:")[0]
    return {name: int(number) for number, _, name in (line.strip().partition(":") for line in listed.splitlines())
            if number.isdigit()}  # fmt: skip


def _text(dump: Path, platform: str, kind: str) -> str:
    name = DUMPED.format(platform, kind)
    found = next(dump.glob(name), None)
    if found is None:
        raise FileNotFoundError(f"XLA wrote no {name} in {dump}")
    return found.read_text("utf-8", errors="replace")
