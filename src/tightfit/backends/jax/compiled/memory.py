"""The memory of a compiled step, from XLA's dump: every buffer with its bytes, its place and its lifetime.

XLA plans all memory of a step when it compiles: for arguments and results, and one piece for all temporary arrays, in
which those that are never alive together lie over each other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tightfit.backends.jax.compiled.program import ARRAY, STACKING, array_of
from tightfit.trace import Allocation, Category, live_bytes

HEADING = re.compile(r"allocation (\d+): size (\d+), (?:page \d+, )?(.*)")
"""A piece's number, bytes and kind; JAX 0.11 has XLA write a page before the kind."""
VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
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
    def peak(self) -> int:
        """Arguments, results that take no argument's place, and all else."""
        return sum(b.bytes for b in (*self.inputs.values(), *self.outputs)) + self.temporary

    @property
    def length(self) -> int:
        """Positions of the program."""
        return max((last for _, last in self.alive.values()), default=0) + 1


def read_memory(assignment: str, live_range: str) -> Memory:
    """The memory that XLA's dump describes. assignment, live_range: the texts of its files of these names."""
    memory = Memory()
    for number, size, kind, values in _pieces(assignment):
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


def _pieces(assignment: str) -> Iterator[tuple[int, int, str, list[Buffer]]]:
    heading: tuple[int, int, str] | None = None
    values: list[Buffer] = []
    for line in [*assignment.splitlines(), ""]:
        if (found := VALUE.match(line)) and heading is not None:
            array = ARRAY.match(found[5])
            dtype, shape = array_of(array[1], array[2]) if array else ("", ())
            values.append(Buffer(_key(found[1], found[2]), heading[0], int(found[4]), int(found[3]), dtype, shape))
        elif heading is not None and not line.startswith(" value"):
            yield *heading, values
            heading = None
        if found := HEADING.match(line):
            heading, values = (int(found[1]), int(found[2]), found[3]), []


def _key(instruction: str, index: str | None) -> str:
    return instruction if index in (None, "{}") else f"{instruction}{index}"
