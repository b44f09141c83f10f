"""A trace from what XLA wrote down about a compiled step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tightfit.backends.jax.predicting.buffers import Memory, inside_allocations, read_memory
from tightfit.backends.jax.predicting.program import ops, read_program
from tightfit.trace import Allocation, Category, Op, Phase, Span, Trace, Unseen

DUMPED = "*gpu_after_optimizations{}.txt"
ASSIGNMENT, ALIVE, REPORT, PROGRAM = "-buffer-assignment", "-live-range", "-memory-usage-report", ""
"""What XLA writes as soon as it has planned a step's memory, in this order but for the program, which comes first."""
STATE = {"params": Category.WEIGHTS, "optimizer": Category.OPTIMIZER}
"""What the parts of the step's state are; the rest of what comes in is other."""
KEYS = re.compile(r"\['([^']*)'\]|\.(\w+)")
NAMES = {Phase.RECOMPUTE: "backward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}
"""Spans by the phase of what runs in them; forward for the rest."""


def memory_is_planned(dump: Path) -> bool:
    """Whether XLA has written all that a trace is read from: the report is the last of it, and kernels come after."""
    return any(dump.glob(DUMPED.format(REPORT))) and any(dump.glob("*.ll"))


def read_trace(dump: Path) -> Trace:
    """The trace of the one step that was compiled for a GPU and dumped into this folder. Raises FileNotFoundError where
    there is none."""
    memory = read_memory(_text(dump, ASSIGNMENT), alive := _text(dump, ALIVE))
    program = read_program(_text(dump, PROGRAM))
    kernels = sorted(ops(program, _positions(alive)), key=lambda op: op.tick)
    origins, stop = program.origins(), memory.length + 1
    trace = Trace(origin="predicted", laid_out=True, ops=kernels)
    trace.allocations = [*_given(memory, origins, stop), *inside_allocations(memory, origins)]
    trace.spans = [Span(name="step 1", start=1, stop=stop, step=1), *_spans(kernels, stop)]
    if memory.host:
        trace.unseen.append(Unseen(name="offloaded values", bytes=memory.host, where="host",
                                   source="XLA's own plan of the step's memory"))
    return trace


def _given(memory: Memory, origins: dict[str, str], stop: int) -> Iterator[Allocation]:
    """What comes in and goes out. The state lives on: its results take its place."""
    for key, buffer in memory.inputs.items():
        name = origins.get(key, key)
        keys = [first or second for first, second in KEYS.findall(name)]
        state = name.startswith("state[")
        category = STATE.get(keys[0], Category.OTHER) if state and keys else Category.OTHER
        yield Allocation(
            born=0 if state else 1, died=None if state else stop, bytes=buffer.bytes, category=category,
            module=keys[-1] if keys else "", op=name, shape=buffer.shape, dtype=buffer.dtype,
        )  # fmt: skip
    for buffer in memory.outputs:
        yield Allocation(born=1, died=stop, bytes=buffer.bytes, category=Category.OTHER, op="results")


def _spans(kernels: list[Op], stop: int) -> Iterator[Span]:
    """Stretches of the program that belong to one phase."""
    stretches = [(name, next(run).tick) for name, run in groupby(kernels, lambda op: NAMES.get(op.phase, "forward"))]
    for (name, start), (_, end) in zip(stretches, [*stretches[1:], ("", stop)], strict=True):
        yield Span(name=name, start=start, stop=end, step=1)


def _positions(live_range: str) -> dict[str, int]:
    """Each instruction's place in the order in which the program runs, by name."""
    listed = live_range.partition("InstructionSequence:")[2].partition("BufferLiveRange:")[0]
    return {name: int(number) for number, _, name in (line.strip().partition(":") for line in listed.splitlines())
            if number.isdigit()}  # fmt: skip


def _text(dump: Path, kind: str) -> str:
    found = next(dump.glob(DUMPED.format(kind)), None)
    if found is None:
        raise FileNotFoundError(f"XLA wrote no {DUMPED.format(kind)} in {dump}")
    return found.read_text("utf-8", errors="replace")
