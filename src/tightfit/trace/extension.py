"""A deep model's trace from two shallow ones: equal to tracing it whole.

A transformer repeats one block, or one group of blocks. Two traces of the same model, the second one group deeper, say
all there is to know: what the deeper one has more is one group's work, wherever it lies between its neighbours', and
what stands outside the blocks (a foreach op over all parameters, the norms' stack) grows with the depth at a constant
rate. `extend` inserts copies of one group, the template. It first inserts one copy and compares the result with the
deeper trace, event by event; where they differ it gives nothing, and the model is to be traced whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tightfit.trace import Allocation, Op, Trace
from tightfit.trace.events import TICK_STEP, Event, Group, Reader, Run, Stack, events_in_order

T = TypeVar("T")

NUMBER = re.compile(r"(?<=\.)\d+")
"""A block's number in a module's name."""


class NotAlike(Exception):
    """The traces are not built of alike groups."""


def extend(shallow: Trace, deeper: Trace, stacks: Sequence[Stack], groups: int) -> Trace | None:
    """The trace with `groups` more groups in every stack than `shallow` has.

    deeper: the same with one group more in every stack. None where the two are not alike as described above.
    """
    reader = Reader(shallow, stacks)
    try:
        rates = _rates(Writer(reader).write(1), deeper, shallow)
        return Writer(reader, rates).write(groups).trace
    except NotAlike:
        return None


@dataclass
class Rates:
    """The growth of each allocation and op outside of the template with every further group: bytes; FLOPs, bytes read
    and bytes written."""

    allocations: dict[int, int] = field(default_factory=dict)
    ops: dict[int, tuple[int, int, int]] = field(default_factory=dict)


@dataclass
class Written:
    """A trace, and for each of its allocations and ops the one it was made from, and whether that is the template's."""

    trace: Trace
    allocations: list[tuple[int, bool]] = field(default_factory=list)
    ops: list[tuple[int, bool]] = field(default_factory=list)


class Writer:
    """Writes a trace that was read again, with more groups."""

    def __init__(self, reader: Reader, rates: Rates | None = None) -> None:
        source = reader.trace
        self.reader = reader
        self.rates = rates or Rates()
        self.written = Written(Trace(origin=source.origin, untraced=list(source.untraced), notes=list(source.notes)))
        self.tick = 0
        self.more = 0
        self._made: dict[tuple[int, int], Allocation] = {}
        self._run: dict[tuple[int, int], int] = {}
        self._waiting: list[tuple[Op, tuple[int, ...], Group | None, int]] = []
        self._opened: dict[int, int] = {}
        self._names: dict[tuple[str, int], str] = {}

    def write(self, more: int) -> Written:
        """With `more` copies of the template in every stack. Raises NotAlike."""
        self.more = more
        runs = self.reader.runs
        for at, run in enumerate(runs):
            copies: Sequence[int] = [0]
            if run.group is not None and run.group.distance == 0:
                copies = range(more + 1) if _ascends(runs, at) else range(more, -1, -1)
            for copy in copies:
                for event in run.events:
                    self._write(event, run.group, copy)
        items = {op.tick: item for item, op in enumerate(self.reader.trace.ops)} if self._waiting else {}
        for op, ticks, group, copy in self._waiting:  # here, for an op may wait for a later one's run before
            events = [Event("op", items[tick]) for tick in ticks]
            op.after = tuple(tick for event in events for tick in self._meant(event, group, copy, self._run))
        source = self.reader.trace.allocations
        if any((a.died is None) != (source[item].died is None) for (item, _), a in self._made.items()):
            raise NotAlike
        return self.written

    def _write(self, event: Event, group: Group | None, copy: int) -> None:
        self.tick += TICK_STEP
        kind, item = event
        in_template = group is not None and group.distance == 0
        if kind == "op":
            self._write_op(item, group, copy, in_template)
        elif kind == "birth":
            self._write_birth(item, copy, in_template)
        elif kind == "open":
            self._opened[item] = self.tick
        elif kind == "close":
            span = self.reader.trace.spans[item]
            self.written.trace.spans.append(replace(span, start=self._opened[item], stop=self.tick))
        else:
            for allocation in self._meant(Event("birth", item), group, copy, self._made):
                if kind == "turn":
                    allocation.category_since = self.tick
                elif allocation.died is None:
                    allocation.died = self.tick
                else:
                    raise NotAlike

    def _write_op(self, item: int, group: Group | None, copy: int, in_template: bool) -> None:
        op, made = self.reader.trace.ops[item], self.written
        gains = (0, 0, 0) if in_template else self.rates.ops.get(item, (0, 0, 0))
        flops, read, wrote = (self.more * gain for gain in gains)
        written = Op(  # not `replace`, which takes most of a deep trace's time
            op.name, self.tick, op.phase, op.op_class, self._name(op.module, copy), op.shapes, op.dtype,
            op.flops + flops, op.bytes_read + read, op.bytes_written + wrote, op.kernels, op.calls, op.seconds,
            op.stream, leading=op.leading, layout=op.layout,
        )
        if op.after:
            self._waiting.append((written, op.after, group, copy))
        self._run[item, copy] = self.tick
        made.trace.ops.append(written)
        made.ops.append((item, in_template))

    def _write_birth(self, item: int, copy: int, in_template: bool) -> None:
        a, made = self.reader.trace.allocations[item], self.written
        gain = 0 if in_template else self.rates.allocations.get(item, 0)
        since = self.tick if a.category_since >= a.born else min(self.tick, a.category_since)
        allocation = Allocation(
            self.tick, None, a.bytes + self.more * gain, a.category, since, self._name(a.module, copy), a.op, a.shape,
            a.dtype, a.place, a.pinned,
        )
        self._made[item, copy] = allocation
        made.trace.allocations.append(allocation)
        made.allocations.append((item, in_template))

    def _name(self, module: str, copy: int) -> str:
        name = self._names.get((module, copy))
        if name is None:
            group = self.reader.place(module)[0]
            further = 0 if group is None or group.distance < 0 else copy if group.distance == 0 else self.more
            name = self._names[module, copy] = self.reader.renumbered(module, group, further)
        return name

    def _meant(
        self, event: Event, group: Group | None, copy: int, made: Mapping[tuple[int, int], T]
    ) -> list[T]:
        """The copies of an allocation's birth, or of an op, that an event in the work of `group` refers to, of which
        this is copy number `copy`.

        What belongs to a group's neighbour is, for a copy, that of the copy's own neighbour.
        """
        born = self.reader.groups[event]
        keys: Sequence[tuple[int, int]]
        if group is not None and born is not None and group.stack == born.stack \
                and abs(born.distance - group.distance) <= self.reader.stacks[group.stack].reach:
            keys = [self._neighbours(event, born, group, copy)]
        elif group is not None and group.distance == 0:
            raise NotAlike
        elif born is None or born.distance != 0:
            keys = [(event.item, 0)]
        else:
            keys = [(event.item, number) for number in range(self.more + 1)]
        try:
            return [made[key] for key in keys]
        except KeyError:
            raise NotAlike from None

    def _neighbours(self, event: Event, born: Group, group: Group, copy: int) -> tuple[int, int]:
        """A neighbour's item as copy number `copy` of `group` sees it: the item or its twin, and which copy of it."""
        place = copy if group.distance == 0 else group.distance + (self.more if group.distance > 0 else 0)
        place += born.distance - group.distance
        if 0 <= place <= self.more:
            distance, copy = 0, place
        else:
            distance, copy = (place if place < 0 else place - self.more), 0
        if distance == born.distance:
            return event.item, copy
        try:
            return self.reader.twins[event][Group(group.stack, distance)], copy
        except KeyError:
            raise NotAlike from None


def _ascends(runs: Sequence[Run], at: int) -> bool:
    """Whether groups are worked on in their order where the template's run stands."""
    group = runs[at].group
    assert group is not None
    for run in runs[at + 1 :]:
        if run.group is not None and run.group.stack == group.stack and run.group.distance != 0:
            return run.group.distance > 0
    for run in reversed(runs[:at]):
        if run.group is not None and run.group.stack == group.stack and run.group.distance != 0:
            return run.group.distance < 0
    return True


def _rates(check: Written, deeper: Trace, shallow: Trace) -> Rates:
    """The growth of what stands outside of the template with one more group. Raises NotAlike where `check`, the shallow
    trace with one copy more, is not the deeper trace."""
    made = check.trace
    if [event for _, event in events_in_order(made)] != [event for _, event in events_in_order(deeper)]:
        raise NotAlike
    rates = Rates()
    for (item, in_template), mine, real in zip(check.allocations, made.allocations, deeper.allocations, strict=True):
        if _traits(mine) != _traits(real):
            raise NotAlike
        gain = real.bytes - shallow.allocations[item].bytes
        if gain and in_template:
            raise NotAlike
        if gain:
            rates.allocations[item] = gain
    order, true_order = ({op.tick: number for number, op in enumerate(trace.ops)} for trace in (made, deeper))
    for (item, in_template), mine_op, real_op in zip(check.ops, made.ops, deeper.ops, strict=True):
        if (mine_op.name, mine_op.module, mine_op.phase) != (real_op.name, real_op.module, real_op.phase):
            raise NotAlike
        after, true_after = {order[tick] for tick in mine_op.after}, {true_order[tick] for tick in real_op.after}
        # Outside of the template, of two places that blocks take turns with the other one may be meant.
        if after != true_after and (in_template or _kinds(made, after) != _kinds(deeper, true_after)):
            raise NotAlike
        old = shallow.ops[item]
        gains = (real_op.flops - old.flops, real_op.bytes_read - old.bytes_read,
                 real_op.bytes_written - old.bytes_written)
        if any(gains) and in_template:
            raise NotAlike
        if any(gains):
            rates.ops[item] = gains
    return rates


def _kinds(trace: Trace, numbers: Iterable[int]) -> list[tuple[str, str]]:
    """Names and streams of the ops of these numbers, sorted."""
    return sorted((trace.ops[number].name, trace.ops[number].stream.value) for number in numbers)


def _traits(a: Allocation) -> tuple[object, ...]:
    """The fields that alike allocations share; their bytes may differ, and the number of the block that memory is named
    after which blocks take turns with."""
    return a.op, NUMBER.sub("", a.module), a.category, a.dtype, a.place
