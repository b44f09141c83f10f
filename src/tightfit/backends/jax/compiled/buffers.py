"""The memory of a compiled step, as XLA's dump tells it: every buffer with its bytes, its place, and when it is alive.

XLA plans all memory of a step when it compiles: what comes in and goes out, and one piece for all that lives only
inside, in which buffers that are never alive together lie over each other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tightfit.trace import Allocation, Category, live_bytes

HEADING = re.compile(r"allocation (\d+): size (\d+), (.*)")
VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
ALIVE = re.compile(r"    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
PAGE = re.compile(r"page \d+, ")
"""What JAX 0.11 puts before a piece's kind."""

DTYPES = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "s32": "int32", "u32": "uint32",
    "s64": "int64", "pred": "bool", "s8": "int8", "u8": "uint8",
}  # fmt: skip
"""Number formats by XLA's names."""

HOST = "color 5, "
"""How XLA marks what lies in the machine's own memory."""
STACKING = "dynamic-update-slice"
"""The instruction that writes one turn's arrays into those that hold a whole loop's."""
FREE = "between arrays"
"""What memory is called that XLA leaves free inside the piece, since no array fits there."""


@dataclass(frozen=True)
class Buffer:
    """A value's place. key: the instruction that makes it, and which of its results. piece: the allocation."""

    key: str
    piece: int
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A step's memory.

    inputs: each argument's piece, by the name of the instruction that stands for it. outputs: of results that have a
    piece of their own. inside: bytes of the piece, or pieces, for all else. buffers: what lies in those. alive: when
    each value is, by its key: positions in the program's order, both ends included. host: bytes in the machine's own
    memory.
    """

    inputs: Mapping[str, Buffer]
    outputs: tuple[Buffer, ...]
    inside: int
    buffers: tuple[Buffer, ...]
    alive: Mapping[str, tuple[int, int]]
    host: int = 0

    @property
    def peak(self) -> int:
        """Arguments, results that take no argument's place, and all else."""
        return sum(b.bytes for b in (*self.inputs.values(), *self.outputs)) + self.inside

    @property
    def length(self) -> int:
        """Positions of the program."""
        return max((last for _, last in self.alive.values()), default=0) + 1


def read_memory(assignment: str, live_range: str) -> Memory:
    """The memory that XLA's dump describes. assignment, live_range: the texts of its files of these names."""
    inputs: dict[str, Buffer] = {}
    outputs, buffers, inside, host = list[Buffer](), list[Buffer](), 0, 0
    for number, size, kind, values in _pieces(assignment):
        if kind.startswith(HOST):
            host += size
        elif kind.startswith("parameter"):
            given = next((value for value in values if "{" not in value.key), values[0])
            inputs[given.key] = replace(given, bytes=size)
        elif kind.startswith("preallocated-temp"):
            inside += size
            buffers += values
        elif "maybe-live-out" in kind:
            outputs.append(replace(values[0], bytes=size) if values else Buffer("", number, 0, size, "", ()))
    alive: dict[str, tuple[int, int]] = {}
    for line in live_range.partition("BufferLiveRange:")[2].splitlines():
        if found := ALIVE.match(line):
            alive[_key(found[1], found[2])] = (int(found[3]), int(found[4]))
        elif alive and not line.startswith("    "):
            break
    return Memory(inputs=inputs, outputs=tuple(outputs), inside=inside, buffers=tuple(buffers), alive=alive,
                  host=host)


def inside_allocations(memory: Memory, makers: Mapping[str, tuple[str, str]]) -> list[Allocation]:
    """What lies in the piece for all else, as allocations from tick 1 on; they add up to the whole piece at its peak.

    makers: what each kernel is called and where it comes from in the model, by its instruction's name, or by the key of
        a value that it makes.
    """
    slots: dict[tuple[int, int, int], list[tuple[int, int, Buffer]]] = defaultdict(list)
    for buffer in memory.buffers:
        if buffer.key in memory.alive:
            first, last = memory.alive[buffer.key]
            slots[buffer.piece, buffer.offset, buffer.bytes].append((first, last, buffer))
    found = []
    for (_, _, size), values in slots.items():
        turns = list(_in_turn(values))
        for number, turn in enumerate(turns):
            op, module = _maker(turn, turns[number - 1 : number] + turns[number + 1 : number + 2], makers)
            found.append(Allocation(
                born=turn.first + 1, died=turn.stop + 1, bytes=size, category=Category.TEMPORARY,
                module=module, op=op, shape=turn.made.shape, dtype=turn.made.dtype,
            ))  # fmt: skip
    _, live = live_bytes(found)
    free = memory.inside - int(live.max(initial=0))
    if free > 0:
        found.append(Allocation(born=1, died=memory.length + 1, bytes=free, category=Category.OTHER, op=FREE))
    return found


def _maker(turn: _Turn, neighbours: list[_Turn], makers: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """What made an array, and where that comes from: of several kernels the one that says most. An array that a loop
    takes along is known by what writes it anew in the same place."""
    alike = [each for each in reversed(neighbours) if each.made.shape == turn.made.shape]
    for each in (turn, *alike):
        told = [makers[key if key in makers else key.partition("{")[0]] for key in each.names
                if key in makers or key.partition("{")[0] in makers]
        if told:
            return max(told, key=lambda maker: (STACKING in maker[0], len(maker[1])))
    return turn.made.key, ""


@dataclass
class _Turn:
    """An array in a place: its first position, one past its last, and the names that it has meanwhile."""

    made: Buffer
    first: int
    stop: int
    names: list[str]


def _in_turn(values: list[tuple[int, int, Buffer]]) -> Iterator[_Turn]:
    """The arrays that a place holds one after the other. Values that are alive together in one place are one array
    under several names, such as a loop's."""
    values.sort(key=lambda value: (value[0], value[1]))
    turn: _Turn | None = None
    for first, last, buffer in values:
        if turn is not None and first < turn.stop - 1:
            turn.stop = max(turn.stop, last + 1)
            if buffer.shape == turn.made.shape:
                turn.names.append(buffer.key)
            continue
        if turn is not None:  # an array may be written over the one that its instruction reads for the last time
            turn.stop = min(turn.stop, max(first, turn.first + 1))
            yield turn
        turn = _Turn(buffer, first, last + 1, [buffer.key])
    if turn is not None:
        yield turn


def _pieces(assignment: str) -> Iterator[tuple[int, int, str, list[Buffer]]]:
    heading: tuple[int, int, str] | None = None
    values: list[Buffer] = []
    for line in assignment.splitlines():
        if found := VALUE.match(line):
            if heading is not None:
                values.append(_buffer(found, heading[0]))
        elif heading is not None and not line.startswith(" value"):
            yield *heading, values
            heading, values = None, []
        if found := HEADING.match(line):
            heading, values = (int(found[1]), int(found[2]), PAGE.sub("", found[3], count=1)), []
    if heading is not None:
        yield *heading, values


def _buffer(found: re.Match[str], piece: int) -> Buffer:
    array = ARRAY.match(found[5])
    dtype = DTYPES.get(array[1], array[1]) if array else ""
    shape = tuple(map(int, array[2].split(","))) if array and array[2] else ()
    return Buffer(_key(found[1], (found[2] or "{}")[1:-1]), piece, int(found[4]), int(found[3]), dtype, shape)


def _key(instruction: str, index: str) -> str:
    return f"{instruction}{{{index}}}" if index else instruction
