"""The trace of a compiled step, from XLA's dump of it: its kernels in the program's order, and every buffer of its
memory with its bytes, its place and its lifetime.

XLA plans all memory of a step when it compiles: for arguments and results, and one piece for all temporary arrays, in
which those that are never alive together lie over each other. A tick is a place in the program's order. The kernels of
a loop stand in it once, with the work of all its turns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from pathlib import Path

from tightfit.backends.jax.compiled.kernels import kernels
from tightfit.backends.jax.compiled.program import ARRAY, STACKING, Program, array_of, read_program
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
HEADING = re.compile(r"(\d+): size (\d+), (?:page \d+, )?(.*)")
"""A piece's number, bytes and kind; JAX 0.11 has XLA write a page before the kind."""
VALUE = re.compile(r"\n value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
ALIVE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
HOST = "color 5, "
"""XLA's mark of what lies in the host's memory."""
CARRIED = "carried by a loop"
"""The maker of an array that no kernel of the program is known to write."""
UNUSED = "between arrays"
"""The name of memory inside the piece where no array fits."""


@dataclass(frozen=True)
class Buffer:
    """A value's place. key: the instruction that makes it, and which of its results. piece: the allocation."""

    key: str
    piece: int
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(kw_only=True)
class Memory:
    """A step's memory.

    inputs: each argument's piece, by the name of its instruction. outputs: of results that have a piece of their own.
    temporary: bytes of the piece, or pieces, for all else. buffers: what lies in those. alive: the lifetime of each
    value, by its key: positions in the program's order, both ends included. host: bytes in the host's memory.
    """

    inputs: dict[str, Buffer] = field(default_factory=dict)
    outputs: list[Buffer] = field(default_factory=list)
    temporary: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    alive: dict[str, tuple[int, int]] = field(default_factory=dict)
    host: int = 0

    @property
    def length(self) -> int:
        """Positions of the program."""
        return max((last for _, last in self.alive.values()), default=0) + 1


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
    live_range = _text(dump, platform, LIVE_RANGE)
    program = read_program(_text(dump, platform, PROGRAM))
    # Each instruction's place in the order in which the program runs.
    listed = live_range.partition("InstructionSequence:")[2].partition("BufferLiveRange:")[0]
    places = {name: int(number) for number, _, name in (line.strip().partition(":") for line in listed.splitlines())
              if number.isdigit()}
    memory = read_memory(_text(dump, platform, ASSIGNMENT), live_range)
    return Description(program, memory, kernels(program, places))


def measured_trace(described: Description, seconds: Mapping[str, float]) -> Trace:
    """As `predicted_trace`, with the seconds of each instruction, by its name, in all its turns. Ticks are nanoseconds
    of the program's order: each instruction stands in it once, as wide as all its turns."""
    timed = {name: replace(op, seconds=seconds.get(name, 0.0)) for name, op in described.ops.items()}
    trace = predicted_trace(replace(described, ops=timed))
    trace.origin = "measured"
    widths = [1] * (described.memory.length + 2)  # a nanosecond at least, so that no two places become one
    for op in trace.ops:
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


def predicted_trace(described: Description) -> Trace:
    """The step's ops and the memory that XLA planned for it."""
    memory, stop = described.memory, described.memory.length + 1
    ops = sorted(described.ops.values(), key=lambda op: op.tick)
    trace = Trace(origin="predicted", laid_out=True, ops=ops)
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


def _text(dump: Path, platform: str, kind: str) -> str:
    name = DUMPED.format(platform, kind)
    found = next(dump.glob(name), None)
    if found is None:
        raise FileNotFoundError(f"XLA wrote no {name} in {dump}")
    return found.read_text("utf-8", errors="replace")


def read_memory(assignment: str, live_range: str) -> Memory:
    """The memory that XLA's dump describes. assignment, live_range: the texts of its files of these names."""
    memory = Memory()
    for piece in f"\n{assignment}".split("\nallocation ")[1:]:
        heading = HEADING.match(piece)
        assert heading is not None, f"XLA writes allocations in another way: {piece[:80]}"
        number, size, kind = int(heading[1]), int(heading[2]), heading[3]
        values = [_buffer(number, *value) for value in VALUE.findall(piece)]
        if kind.startswith(HOST):
            memory.host += size
        elif kind.startswith("parameter"):
            given = next((value for value in values if "{" not in value.key), values[0])
            memory.inputs[given.key] = replace(given, bytes=size)
        elif kind.startswith("preallocated-temp"):
            memory.temporary += size
            memory.buffers += values
        elif "maybe-live-out" in kind:
            memory.outputs.append(replace(values[0], bytes=size) if values else Buffer("", number, 0, size, "", ()))
    for line in live_range.partition("BufferLiveRange:")[2].splitlines():
        if found := ALIVE.match(line):
            memory.alive[_key(found[1], found[2])] = (int(found[3]), int(found[4]))
        elif memory.alive and not line.startswith("    "):
            break
    return memory


def temporary_allocations(memory: Memory, makers: Mapping[str, tuple[str, str]]) -> list[Allocation]:
    """The arrays in the piece for all else, from tick 1 on; they add up to the whole piece at its peak.

    makers: each kernel's name and place in the model, by its instruction's name.
    """
    slots: dict[tuple[int, int, int], list[Buffer]] = defaultdict(list)
    for buffer in memory.buffers:
        if buffer.key in memory.alive:
            slots[buffer.piece, buffer.offset, buffer.bytes].append(buffer)
    found = []
    for (_, _, size), values in slots.items():
        for made, first, stop, keys in _in_turn(values, memory.alive):
            # A loop's array has the loop's name, and is written by a kernel that makes such an array in this place.
            op, module = _maker(keys, makers) or _maker([b.key for b in values if b.shape == made.shape], makers) \
                or (CARRIED if "{" in made.key else made.key, "")
            found.append(Allocation(
                born=first + 1, died=stop + 1, bytes=size, category=Category.TEMPORARY, module=module, op=op,
                shape=made.shape, dtype=made.dtype,
            ))  # fmt: skip
    _, live = live_bytes(found)
    unused = memory.temporary - int(live.max(initial=0))
    if unused > 0:
        found.append(Allocation(born=1, died=memory.length + 1, bytes=unused, category=Category.OTHER, op=UNUSED))
    return found


def _maker(keys: list[str], makers: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """The kernel that made an array of these names: of several the one that stacks, or that is deepest in the model."""
    known = [makers[name] for key in keys if (name := key.partition("{")[0]) in makers]
    return max(known, key=lambda maker: (STACKING in maker[0], len(maker[1])), default=None)


def _in_turn(
    values: list[Buffer], alive: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[Buffer, int, int, list[str]]]:
    """The arrays that a place holds one after the other: the first value of each, its first position, one past its
    last, and its names. Values that are alive together in one place are one array under several names."""
    turns: list[tuple[Buffer, int, int, list[str]]] = []
    for buffer in sorted(values, key=lambda value: alive[value.key]):
        first, last = alive[buffer.key]
        if not turns or first >= turns[-1][2] - 1:
            turns.append((buffer, first, last + 1, [buffer.key]))
            continue
        made, begun, stop, keys = turns[-1]
        turns[-1] = (made, begun, max(stop, last + 1), [*keys, buffer.key] if buffer.shape == made.shape else keys)
    for (made, first, stop, keys), following in zip(turns, [*turns[1:], None], strict=True):
        # An array may be written over the one that its instruction reads for the last time.
        yield made, first, stop if following is None else min(stop, max(following[1], first + 1)), keys


def _buffer(piece: int, instruction: str, index: str, size: str, offset: str, described: str) -> Buffer:
    array = ARRAY.match(described)
    dtype, shape = array_of(array[1], array[2]) if array else ("", ())
    return Buffer(_key(instruction, index), piece, int(offset), int(size), dtype, shape)


def _key(instruction: str, index: str) -> str:
    return instruction if index in ("", "{}") else f"{instruction}{index}"
