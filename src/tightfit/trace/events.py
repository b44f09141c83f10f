"""A trace's events in order, grouped by the blocks in whose work they happen."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tightfit.trace import Category, Trace

TICK_STEP = 4
"""Ticks from one event of a predicted trace to the next: between them goes what torch does out of sight."""
NO_MODULE_RUNS = ("optimizer", "save", "resume")
"""Spans in which no module runs: what is released there lies where its owner does."""

LIST_GROUPS = 3
"""Memory of so many groups that is released at one go is a list's: a loop over the parameters keeps the last one's
temporaries until it makes the next one's."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A repeated stack as it was traced.

    path: what its blocks are called, up to their number, such as `model.layers`.
    period: blocks in a group; groups are alike. template: the number of the group to copy, one with a group on either
        side of it. head: blocks in front of the first group. reach: groups on either side that a group's work has to do
        with.
    """

    path: str
    period: int
    template: int
    head: int = 0
    reach: int = 1


class Group(NamedTuple):
    """A group of a stack, by its distance from the template."""

    stack: int
    distance: int


class Event(NamedTuple):
    """An event at a tick: a birth, a turn of category, a death, an op, the opening or close of a span."""

    kind: str
    item: int


@dataclass
class Run:
    """Consecutive events of one group, or outside of all.

    outside: whether they lie in a span in which no module runs.
    """

    group: Group | None
    outside: bool = False
    events: list[Event] = field(default_factory=list)


class Reader:
    """A trace's events in order, in runs of one group each."""

    def __init__(self, trace: Trace, stacks: Sequence[Stack]) -> None:
        self.trace = trace
        self.stacks = stacks
        self._patterns = [re.compile(re.escape(stack.path) + r"\.(\d+)(?=\.|$)") for stack in stacks]
        self._places: dict[str, tuple[Group | None, str]] = {"": (None, "")}
        self.events = events_in_order(trace)
        self.runs = _joined(list(self._runs()))
        self.groups = {event: run.group for run in self.runs for event in run.events if event.kind in ("birth", "op")}
        self.twins = self._twins()

    def place(self, module: str) -> tuple[Group | None, str]:
        """The group that a module lies in, and its name with the group's number left out."""
        if module not in self._places:
            self._places[module] = self._find(module)
        return self._places[module]

    def _find(self, module: str) -> tuple[Group | None, str]:
        for number, (stack, pattern) in enumerate(zip(self.stacks, self._patterns, strict=True)):
            found = pattern.match(module)
            if found is not None:
                group, inside = divmod(int(found[1]) - stack.head, stack.period)
                return Group(number, group - stack.template), f"{stack.path}.+{inside}{module[found.end():]}"
        return None, module

    def renumbered(self, module: str, group: Group | None, more: int) -> str:
        """The module's name with its block `more` groups further on."""
        if group is None or not more:
            return module
        found = self._patterns[group.stack].match(module)
        assert found is not None
        stack = self.stacks[group.stack]
        return f"{stack.path}.{int(found[1]) + more * stack.period}{module[found.end():]}"

    def _runs(self) -> Iterator[Run]:
        trace = self.trace
        apart = [(s.start, s.stop) for s in trace.spans if s.name in NO_MODULE_RUNS]
        parted = self._parted()
        run, group, outside = Run(None), None, False
        for (tick, event), (_, following) in zip(self.events, [*self.events[1:], (0, Event("close", 0))], strict=True):
            if event.kind in ("open", "close"):
                outside = any(a <= tick < z for a, z in apart)
            if event.kind == "op" and outside and not trace.ops[event.item].module and following.kind == "birth":
                group = self.place(trace.allocations[following.item].module)[0]  # what it makes says whose it is
            elif event.kind == "op":
                group = self.place(trace.ops[event.item].module)[0]
            elif event.kind == "birth" or (event.kind == "death" and outside and event.item in parted):
                group = self.place(trace.allocations[event.item].module)[0]
            elif event.kind in ("open", "close"):
                group = None
            if group != run.group or outside != run.outside:
                yield run
                run = Run(group, outside)
            run.events.append(event)
        yield run

    def _parted(self) -> set[int]:
        """Allocations whose release, where no module runs, lies with their owner: a parameter's own, its gradient or
        its states, released one parameter after the other, and the lists that a foreach op made, released at one go."""
        trace = self.trace
        parted = {i for i, a in enumerate(trace.allocations) if a.category in (Category.GRADIENTS, Category.OPTIMIZER)}
        for kind, streak in itertools.groupby((event for _, event in self.events), key=lambda event: event.kind):
            released = [event.item for event in streak] if kind == "death" else []
            if len({self.place(trace.allocations[item].module)[0] for item in released}) >= LIST_GROUPS:
                parted.update(released)
        return parted

    def _twins(self) -> dict[Event, dict[Group, int]]:
        """For every allocation born in a group, and every op that runs in one: the same one of each group."""
        same: dict[tuple[object, ...], dict[Group, int]] = defaultdict(dict)
        counts: dict[tuple[object, ...], int] = defaultdict(int)
        twins: dict[Event, dict[Group, int]] = {}
        trace, spans = self.trace, 0
        waiting = any(op.after for op in trace.ops)
        for run in self.runs:
            for event in run.events:
                spans += event.kind == "open"
                if run.group is None or event.kind not in (("birth", "op") if waiting else ("birth",)):
                    continue
                if event.kind == "birth":
                    a = trace.allocations[event.item]
                    what: tuple[object, ...] = (a.module, a.op, a.shape, a.dtype, a.place)
                else:
                    op = trace.ops[event.item]
                    what = (op.module, op.name, op.shapes, op.dtype, op.stream)
                key = (spans, run.group.stack, event.kind, self.place(str(what[0]))[1], *what[1:])
                counts[run.group, *key] += 1
                twins[event] = same[counts[run.group, *key], *key]
                twins[event][run.group] = event.item
        return twins


def events_in_order(trace: Trace) -> list[tuple[int, Event]]:
    """A trace's events, each with its tick."""
    events = [(s.start, Event("open", i)) for i, s in enumerate(trace.spans)]
    events += [(s.stop, Event("close", i)) for i, s in enumerate(trace.spans)]
    events += [(op.tick, Event("op", i)) for i, op in enumerate(trace.ops)]
    for i, a in enumerate(trace.allocations):
        events.append((a.born, Event("birth", i)))
        if a.category_since > a.born:
            events.append((a.category_since, Event("turn", i)))
        if a.died is not None:
            events.append((a.died, Event("death", i)))
    events.sort()
    return list(_deaths_by_birth(events))


def _deaths_by_birth(events: list[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
    """The events with what is released at one go in the order of its birth: a cache is emptied in any order."""
    for kind, streak in itertools.groupby(events, key=lambda pair: pair[1].kind):
        if kind != "death":
            yield from streak
        else:
            ticks, deaths = zip(*streak, strict=True)
            yield from zip(ticks, sorted(deaths), strict=True)


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The runs, with what happens outside of all groups between two of one stack counted to the later one."""
    joined: list[Run] = []
    for at, run in enumerate(runs):
        if not run.events:
            continue
        if len(joined) > 1 and run.group is not None and joined[-1].group is None:
            between, before = joined[-1], joined[-2]
            inside = before.group is not None and before.group.stack == run.group.stack
            if inside and not _parts(between, runs[at:]):
                joined.pop()
                run.events[:0] = between.events
        if joined and joined[-1].group is not None and joined[-1].group == run.group:
            joined[-1].events += run.events
        else:
            joined.append(run)
    return joined


def _parts(between: Run, later: Sequence[Run]) -> bool:
    """Whether a run outside of all groups is more than a preparation for the group's work that follows, such as a
    factor that an optimizer computes for one parameter, out of numbers that are no parameter's."""
    if any(event.kind in ("open", "close") for event in between.events):
        return True
    if not between.outside:
        return False
    if any(event.kind == "death" for event in between.events):
        return True
    born = {event.item for event in between.events if event.kind == "birth"}
    for run in itertools.takewhile(lambda run: born and run.group in (None, later[0].group), later):
        born.difference_update(event.item for event in run.events if event.kind == "death")
    return bool(born)
