"""Loops whose turns are alike, such as over chunks of a loss: a few are followed, and stand for the others.

What a trace says is the same as if every turn had run, and takes a fraction of the time to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from tightfit.backends.pytorch.follow.memory import later
from tightfit.backends.pytorch.follow.op_streams import op_later
from tightfit.backends.pytorch.follow.tracker import Tracker

T = TypeVar("T")

FEWEST_TURNS = 6
"""Turns from which on following a few is quicker."""


def alike_turns(tracker: Tracker, items: Sequence[T]) -> Iterable[T]:
    """The items of a loop that have to be gone through. Where the third turn asks for the same as the second, the
    tracker's trace gets the others, up to the last, as copies of it."""
    if len(items) < FEWEST_TURNS or torch.compiler.is_compiling():  # which unrolls the loop
        return items
    return _followed(tracker, items)


def _followed(tracker: Tracker, items: Sequence[T]) -> Iterator[T]:
    yield items[0]
    second = _Moment.of(tracker)
    yield items[1]
    third = _Moment.of(tracker)
    yield items[2]
    end, memory = _Moment.of(tracker), tracker.memory
    ticks = end.tick - third.tick
    alike = (
        second.alive == third.alive == end.alive
        and third.backwards - second.backwards == end.backwards - third.backwards
        and [op_later(op, ticks) for op in tracker.ops[second.ops : third.ops]] == tracker.ops[third.ops :]
        and [later(a, ticks) for a in memory.allocations[second.allocations : third.allocations]]
        == memory.allocations[third.allocations :]
    )
    if not alike:
        yield from items[3:]
        return
    for number in range(1, len(items) - 3):
        tracker.repeat(third.ops, end.ops, number * ticks)
        memory.repeat(third.allocations, end.allocations, number * ticks)
        tracker.backwards += [tick + number * ticks for tick in tracker.backwards[third.backwards : end.backwards]]
    memory.tick += (len(items) - 4) * ticks
    yield items[-1]


class _Moment(NamedTuple):
    """Position of a trace. alive: numbers of the allocations that are."""

    tick: int
    ops: int
    allocations: int
    backwards: int
    alive: frozenset[int]

    @classmethod
    def of(cls, tracker: Tracker) -> _Moment:
        memory = tracker.memory
        return cls(memory.tick, len(tracker.ops), len(memory.allocations), len(tracker.backwards), memory.alive())
