"""The trace of a compiled step, from XLA's dump of it: its kernels in the program's order, and every array of its
memory with its bytes and its lifetime.

XLA plans all memory of a step when it compiles: for arguments and results, and one piece for all temporary arrays, in
which those that are never alive together lie over each other. A tick is a place in the program's order. The kernels of
a loop stand in it once, with the work of all its turns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

from tightfit.backends.jax.compiled.kernels import kernels
from tightfit.backends.jax.compiled.program import STACKING, Instruction, Program, arrays_of, read_program
from tightfit.trace import Allocation, Category, Op, Phase, Span, Trace, UntracedMemory, live_bytes

DUMPED = "*.jit_step.*{}_after_optimizations{}.txt"
"""XLA's files on `update.lower_step`'s program, by platform and kind; others may be compiled too."""
ASSIGNMENT, LIVE_RANGE, REPORT, PROGRAM = "-buffer-assignment", "-live-range", "-memory-usage-report", ""
"""XLA's kinds of files on a step whose memory is planned, in the order of writing, but for the program: it is first."""
STATE = {"params": Category.WEIGHTS, "optimizer": Category.OPTIMIZER}
"""Categories of the step's state by its parts; other arguments are other."""
KEYS = re.compile(r"\['([^']*)'\]|\.(\w+)")
NAMES = {Phase.RECOMPUTE: "backward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}
"""Spans by the phase of their kernels; forward for the rest."""
PLACE = re.compile(r"^    (\d+):([^\s:]+)$", re.MULTILINE)
"""An instruction's place in the order in which the program runs."""
HEADING = re.compile(r"\d+: size (\d+), (?:page \d+, )?(.*)")
"""A piece's bytes and kind; JAX 0.11 has XLA write a page before the kind."""
VALUE = re.compile(r"\n value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
ALIVE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
HOST = "color 5, "
"""XLA's mark of what lies in the host's memory."""
CARRIED = "carried by a loop"
"""The maker of an array that no kernel of the program is known to write."""
UNUSED = "between arrays"
"""The name of memory inside the piece where no array fits."""

Makers = Mapping[str, tuple[str, str]]
"""Each kernel's name and place in the model, by its instruction's name."""


class Value(NamedTuple):
    """A value's place in a piece of memory, and its lifetime as ticks, both ends included. key: the instruction that
    makes it, and which of its results."""

    key: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class CompiledStep:
    """A step as XLA compiled it. ops: its kernels, by the names of their instructions. stop: the tick at its end.
    host_bytes: what lies in the host's memory."""

    program: Program
    ops: Mapping[str, Op]
    allocations: list[Allocation]
    stop: int
    host_bytes: int


def memory_is_planned(dump: Path) -> bool:
    """Whether XLA has written all that a trace is read from: the report is the last of it, and kernels come after."""
    return any(dump.glob(DUMPED.format("gpu", REPORT))) and any(dump.glob("*.ll"))


def read_step(dump: Path, platform: str) -> CompiledStep:
    """The one step that was compiled for a platform, `gpu` or `cpu`, and dumped into this folder. Raises
    FileNotFoundError where there is none."""
    program, live_range = read_program(_text(dump, platform, PROGRAM)), _text(dump, platform, LIVE_RANGE)
    ops = kernels(program, {name: int(number) for number, name in PLACE.findall(live_range)})
    makers = {name: (op.name, op.module) for name, op in ops.items()}
    found = read_memory(_text(dump, platform, ASSIGNMENT), live_range, makers, program.computations[program.entry])
    return CompiledStep(program, ops, *found)


def trace_of(step: CompiledStep, seconds: Mapping[str, float] | None = None) -> Trace:
    """The step's ops and the memory that XLA planned for it.

    seconds: measured, of each instruction by its name, in all its turns. Ticks are then nanoseconds of the program's
    order: each instruction stands in it once, as wide as all its turns.
    """
    timed = [op if seconds is None else replace(op, seconds=seconds.get(name, 0.0)) for name, op in step.ops.items()]
    widths = [1] * (step.stop + 1)  # a nanosecond at least, so that no two places become one
    for op in timed:
        widths[op.tick] += round(1e9 * (op.seconds or 0.0))
    moments = [0, *accumulate(widths)]

    def span(name: str, start: int, stop: int) -> Span:
        length = None if seconds is None else (moments[stop] - moments[start]) / 1e9
        return Span(name=name, start=moments[start], stop=moments[stop], step=1, seconds=length)

    ops = sorted(timed, key=lambda op: op.tick)
    trace = Trace(origin="predicted" if seconds is None else "measured", laid_out=True)
    stretches = [(name, next(run).tick) for name, run in groupby(ops, lambda op: NAMES.get(op.phase, "forward"))]
    ends = [*(start for _, start in stretches[1:]), step.stop]
    trace.spans = [span("step 1", 1, step.stop),
                   *(span(name, start, end) for (name, start), end in zip(stretches, ends, strict=True))]
    trace.ops = [replace(op, tick=moments[op.tick]) for op in ops]
    trace.allocations = [replace(made, born=moments[made.born], died=None if made.died is None else moments[made.died])
                         for made in step.allocations]
    if step.host_bytes:
        trace.untraced.append(UntracedMemory(name="offloaded values", bytes=step.host_bytes, where="host",
                                   source="XLA's own plan of the step's memory"))
    return trace


def read_memory(
    assignment: str, live_range: str, makers: Makers, arguments: Mapping[str, Instruction]
) -> tuple[list[Allocation], int, int]:
    """The arrays of a step, from tick 1 on; the tick at its end; and bytes in the host's memory.

    assignment, live_range: the texts of XLA's files of these names. arguments: the program's, by name.
    """
    alive = {_key(name, index): (int(first) + 1, int(last) + 1)
             for name, index, first, last in ALIVE.findall(live_range)}
    stop = max((last for _, last in alive.values()), default=0) + 1
    found, temporary, planned, host = list[Allocation](), list[Allocation](), 0, 0
    for piece in f"\n{assignment}".split("\nallocation ")[1:]:
        heading = HEADING.match(piece)
        assert heading is not None, f"XLA writes allocations in another way: {piece[:80]}"
        size, kind = int(heading[1]), heading[2]
        values = [_value(alive, *value) for value in VALUE.findall(piece)]
        if kind.startswith(HOST):
            host += size
        elif kind.startswith("parameter"):
            given = next((value for value in values if "{" not in value.key), values[0])
            found.append(_argument(given, size, arguments, stop))
        elif kind.startswith("preallocated-temp"):
            planned += size
            temporary += _temporary(values, makers)
        elif "maybe-live-out" in kind:
            found.append(Allocation(born=1, died=stop, bytes=size, category=Category.OTHER, op="results"))
    unused = planned - int(live_bytes(temporary)[1].max(initial=0))
    if unused > 0:
        temporary.append(Allocation(born=1, died=stop, bytes=unused, category=Category.OTHER, op=UNUSED))
    return [*found, *temporary], stop, host


def _argument(given: Value, size: int, arguments: Mapping[str, Instruction], stop: int) -> Allocation:
    """An argument of the step. The state lives on: its results take its place."""
    name = arguments[given.key].op_name if given.key in arguments else given.key
    keys = [first or second for first, second in KEYS.findall(name)]
    state = name.startswith("state[")
    return Allocation(
        born=0 if state else 1, died=None if state else stop, bytes=size, module=keys[-1] if keys else "", op=name,
        category=STATE.get(keys[0], Category.OTHER) if state and keys else Category.OTHER,
        shape=given.shape, dtype=given.dtype,
    )  # fmt: skip


def _temporary(values: list[Value], makers: Makers) -> Iterator[Allocation]:
    """The arrays in a piece for temporary ones, each place's one after the other. Values that are alive together in one
    place are one array under several names; a loop's has the loop's name, and is written by a kernel that makes such an
    array in this place."""
    places = defaultdict[tuple[int, int], list[Value]](list)
    for value in sorted(values, key=lambda value: value.first):
        if value.last:
            places[value.offset, value.bytes].append(value)
    for held in places.values():
        arrays = list[list[Value]]()
        for value in held:
            if arrays and value.first < max(other.last for other in arrays[-1]):
                arrays[-1].append(value)
            else:
                arrays.append([value])
        for names, following in zip(arrays, [*arrays[1:], None], strict=True):
            made, died = names[0], max(value.last for value in names) + 1
            if following:  # an array may be written over the one that its instruction reads for the last time
                died = min(died, max(following[0].first, made.first + 1))
            op, module = _maker(made, names, makers) or _maker(made, held, makers) or \
                (CARRIED if "{" in made.key else made.key, "")
            yield Allocation(born=made.first, died=died, bytes=made.bytes, module=module, op=op, shape=made.shape,
                             dtype=made.dtype)


def _maker(made: Value, names: list[Value], makers: Makers) -> tuple[str, str] | None:
    """The kernel that made an array of these names: of several the one that stacks, or that is deepest in the model."""
    known = [makers[name] for value in names if value.shape == made.shape
             and (name := value.key.partition("{")[0]) in makers]
    return max(known, key=lambda maker: (STACKING in maker[0], len(maker[1])), default=None)


def _text(dump: Path, platform: str, kind: str) -> str:
    name = DUMPED.format(platform, kind)
    found = next(dump.glob(name), None)
    if found is None:
        raise FileNotFoundError(f"XLA wrote no {name} in {dump}")
    return found.read_text("utf-8", errors="replace")


def _value(alive: dict[str, tuple[int, int]], instruction: str, index: str, size: str, offset: str, text: str) -> Value:
    key = _key(instruction, index)
    array = ("", ()) if text.startswith("(") else arrays_of(text)[0]
    return Value(key, int(offset), int(size), *array, *alive.get(key, (0, 0)))


def _key(instruction: str, index: str) -> str:
    return instruction if index in ("", "{}") else f"{instruction}{index}"
